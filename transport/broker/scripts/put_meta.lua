-- Write one value of the run.  Request: name, ttl_ms (0: for good), value.  Reply: 1. Idempotent.

local request = cjson.decode(ARGV[3])
local value = ARGV[request.value]
if request.ttl_ms > 0 then
  redis.call('SET', key(KEY.meta .. request.name), value, 'PX', request.ttl_ms)
else
  redis.call('SET', key(KEY.meta .. request.name), value)
end
return 1
