-- Create a queue's consumer group from its first entry on, if there is none.  Request: queue.  Reply: 1. Idempotent.

local queue = cjson.decode(ARGV[3]).queue
redis.pcall('XGROUP', 'CREATE', key(queue), GROUP, '0', 'MKSTREAM') -- an error says that there is one
redis.call('SADD', key(KEY.streams), queue)
return 1
