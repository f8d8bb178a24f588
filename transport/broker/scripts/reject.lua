-- Bury one pending entry and append what tells of it. Nothing happens when it is not pending any more.
-- Request: queue, id, reason, appends {stream, fields}.  Reply: 1 or 0.

return once(function(request)
  local pending = redis.pcall('XPENDING', key(request.queue), GROUP, request.id, request.id, 1)
  if pending.err or #pending == 0 then
    return 0
  end
  bury(request.queue, request.id, request.reason)
  add_all(request.appends)
  return 1
end)
