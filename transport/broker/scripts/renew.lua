-- Continue the lease of those entries that this consumer still holds.
-- Request: queue, consumer, ids.  Reply: the ids it holds. Sending it twice does no harm.

local request = cjson.decode(ARGV[3])
local held = {}
for _, id in ipairs(request.ids) do
  local pending = redis.pcall('XPENDING', key(request.queue), GROUP, id, id, 1, request.consumer)
  if not pending.err and #pending == 1 then
    -- JUSTID restarts the idle time without counting a delivery.
    redis.call('XCLAIM', key(request.queue), GROUP, request.consumer, 0, id, 'JUSTID')
    held[#held + 1] = id
  end
end
return held
