-- Raise a role's fencing epoch, in one step with the claim of a caller that has one.
-- Request: role, at_least, claim?.  Reply: the new epoch.

return once(function(request)
  local refused
  if request.claim then
    refused = hold_run(request.claim, '')
  else
    refused = refuse_other_run()
  end
  if refused then
    return refused
  end
  local current = tonumber(redis.call('HGET', key(KEY.epochs), request.role) or '0')
  local epoch = math.max(current, request.at_least) + 1
  redis.call('HSET', key(KEY.epochs), request.role, epoch)
  return epoch
end)
