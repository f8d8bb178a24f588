-- Create a queue's consumer group from its first entry on, if there is none.  Request: queue.  Reply: 1. Idempotent.

local queue = cjson.decode(ARGV[3]).queue
local created = redis.pcall('XGROUP', 'CREATE', key(queue), GROUP, '0', 'MKSTREAM')
if created.err and not string.find(created.err, 'BUSYGROUP', 1, true) then
  return created -- a server that is full, or no master
end
redis.call('SADD', key(KEY.streams), queue)
return 1
