-- Put a dead letter back into its queue as a new entry.  Request: id.  Reply: the entry's id, '' when there is no letter.

return once(function(request)
  local letter = redis.call('XRANGE', key(KEY.dead), request.id, request.id)[1]
  if not letter then
    return ''
  end
  local queue, fields = nil, {}
  for i = 1, #letter[2], 2 do
    local name, value = letter[2][i], letter[2][i + 1]
    if name == 'dead_queue' then
      queue = value
    elseif string.sub(name, 1, 5) ~= 'dead_' then
      fields[#fields + 1] = name
      fields[#fields + 1] = value
    end
  end
  if not queue then
    return '' -- foreign bytes: they came from no queue
  end
  redis.call('XDEL', key(KEY.dead), request.id)
  ensure_group(queue)
  return redis.call('XADD', key(queue), '*', unpack(fields))
end)
