-- Append entries to one stream, each under its own id or "*".
-- Request: fence?, stream, queue (1 or 0), entries {id, fields}.  Reply: ids, '' for one that was already there.

return once(function(request)
  local refused = refuse_fence(request.fence)
  if refused then
    return refused
  end
  if request.queue == 1 then
    ensure_group(request.stream)
  end
  local ids = {}
  for i, entry in ipairs(request.entries) do
    ids[i] = add(request.stream, entry[1], entry[2]) or ''
  end
  return ids
end)
