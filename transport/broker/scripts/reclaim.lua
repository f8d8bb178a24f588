-- Take over pending entries whose lease ran out, or bury those that were delivered too often.
-- Request: queue, consumer, idle_ms, max_deliveries, count.  Reply: {{id, deliveries, fields} ...}, {{letter id, fields} ...}.

local function expired(request)
  local pending =
    redis.pcall('XPENDING', key(request.queue), GROUP, 'IDLE', request.idle_ms, '-', '+', request.count)
  return pending.err and {} or pending -- NOGROUP: nobody has used this queue yet
end

return once(function(request)
  local taken, dead = {}, {}
  for _, entry in ipairs(expired(request)) do
    local id, deliveries = entry[1], entry[4]
    if deliveries >= request.max_deliveries then
      dead[#dead + 1] = bury(request.queue, id, 'delivered ' .. deliveries .. ' times and never finished')
    else
      local claimed = redis.call('XCLAIM', key(request.queue), GROUP, request.consumer, 0, id)[1]
      if claimed then -- else the entry itself was deleted, and XCLAIM has forgotten it
        taken[#taken + 1] = { id, deliveries + 1, claimed[2] }
      end
    end
  end
  return { taken, dead }
end)
