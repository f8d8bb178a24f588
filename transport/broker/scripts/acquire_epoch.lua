-- Raise a role's fencing epoch.  Request: role, at_least.  Reply: the new epoch.

return once(function(request)
  local current = tonumber(redis.call('HGET', key(KEY.epochs), request.role) or '0')
  local epoch = math.max(current, request.at_least) + 1
  redis.call('HSET', key(KEY.epochs), request.role, epoch)
  return epoch
end)
