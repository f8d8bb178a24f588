-- Count the processes that carried a name.  Request: name.  Reply: 1, 2, 3, ...

return once(function(request)
  return redis.call('HINCRBY', key(KEY.incarnations), request.name, 1)
end)
