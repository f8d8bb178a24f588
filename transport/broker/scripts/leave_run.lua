-- A start is not live any more.  Request: start.  Reply: 1. Idempotent.

local start = cjson.decode(ARGV[3]).start
if redis.call('GET', key(KEY.owner_alive)) == start then
  redis.call('UNLINK', key(KEY.owner_alive))
end
return 1
