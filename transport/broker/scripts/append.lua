-- Append entries to streams, each under its own id or "*".
-- Request: fence?, mark {after, now}?, streams {stream, 1 for a queue or 0, entries {id, fields}}.
-- Reply: per stream its ids, '' for one that was already there.

return once(function(request)
  local refused = refuse_fence(request.fence)
  if refused then
    return refused
  end
  if request.mark then
    local after, now = unpack(request.mark)
    local held = redis.call('GET', key(KEY.mark)) or 'none'
    if after ~= '' and held ~= after then
      return redis.error_reply('TAILLOST mark ' .. held .. ', not ' .. after)
    end
    redis.call('SET', key(KEY.mark), now)
  end
  local reply = {}
  for i, write in ipairs(request.streams) do
    local stream, is_queue, entries = unpack(write)
    if is_queue == 1 and #entries > 0 then
      ensure_group(stream)
    end
    local ids = {}
    for j, entry in ipairs(entries) do
      ids[j] = add(stream, entry[1], entry[2]) or ''
    end
    reply[i] = ids
  end
  return reply
end)
