-- Every stream of the run with its length.  Request: {}.  Reply: stream, length, stream, length, ...
-- One step and one reply: a run of 1,000 workers has 2,000 streams, and somebody asks twice a second.

local found = {}
for _, stream in ipairs(redis.call('SMEMBERS', key(KEY.streams))) do
  found[#found + 1] = stream
  found[#found + 1] = redis.call('XLEN', key(stream))
end
return found
