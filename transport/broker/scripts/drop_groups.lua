-- Free groups, their rows and the logs of their partial samples.
-- Request: groups {group_key, what its row keys start with, that log}.  Reply: bytes freed.
-- Deleting comes first: a server that is out of memory lets a script write once it has freed something.

return once(function(request)
  local freed = 0
  for _, group in ipairs(request.groups) do
    local group_key, row_prefix, partial = unpack(group)
    redis.call('UNLINK', key(partial))
    redis.call('SREM', key(KEY.streams), partial)
    local size, bytes = unpack(redis.call('HMGET', group_key, 'size', 'bytes'))
    if size then
      redis.call('UNLINK', group_key)
      for sample = 0, tonumber(size) - 1 do
        redis.call('UNLINK', row_prefix .. sample)
      end
      freed = freed + tonumber(bytes)
    end
  end
  if freed > 0 then
    redis.call('DECRBY', key(KEY.retained_bytes), freed)
  end
  return freed
end)
