-- Renew a worker's lease, or end it.  Request: worker, ttl_ms (0: end it), status.  Reply: 1. Idempotent.

local request = cjson.decode(ARGV[3])
if request.ttl_ms > 0 then
  redis.call('SET', key(KEY.lease .. request.worker), ARGV[request.status], 'PX', request.ttl_ms)
  redis.call('SADD', key(KEY.workers), request.worker)
else
  redis.call('DEL', key(KEY.lease .. request.worker))
  redis.call('SREM', key(KEY.workers), request.worker)
end
return 1
