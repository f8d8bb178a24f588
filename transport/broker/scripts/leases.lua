-- Status of every worker whose lease is alive.  Request: {}.  Reply: worker, status, worker, status, ...
-- The lease is the key's own time to live; the set only saves scanning for it and forgets those that ended.

local alive = {}
for _, worker in ipairs(redis.call('SMEMBERS', key(KEY.workers))) do
  local status = redis.call('GET', key(KEY.lease .. worker))
  if status then
    alive[#alive + 1] = worker
    alive[#alive + 1] = status
  else
    redis.call('SREM', key(KEY.workers), worker)
  end
end
return alive
