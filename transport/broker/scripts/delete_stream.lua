-- Remove a stream.  Request: stream, task (whose spec goes with it; '': none).  Reply: 1. Idempotent.

local request = cjson.decode(ARGV[3])
if request.task ~= '' then
  redis.call('HDEL', key(KEY.task_specs), request.task)
end
redis.call('DEL', key(request.stream))
redis.call('SREM', key(KEY.streams), request.stream)
return 1
