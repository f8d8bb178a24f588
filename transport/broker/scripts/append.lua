-- Append entries to streams, each under its own id or "*".
-- Request: fence?, streams {stream, 1 for a queue or 0, entries {id, fields}}.
-- Reply: per stream its ids, '' for one that was already there.

return once(function(request)
  local refused = refuse_fence(request.fence)
  if refused then
    return refused
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
