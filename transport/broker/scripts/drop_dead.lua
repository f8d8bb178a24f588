-- Forget a dead letter.  Request: id.  Reply: 1, or 0 when it was not there.

return once(function(request)
  return redis.call('XDEL', key(KEY.dead), request.id)
end)
