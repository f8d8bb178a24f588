-- Store tasks. Request: replace (1: in place of the run's former ones; those of users stay), tasks {name, spec as JSON}.
-- Reply: 1. Idempotent.

local request = cjson.decode(ARGV[3])
if request.replace == 1 then
  for _, name in ipairs(redis.call('HKEYS', key(KEY.task_specs))) do
    if string.sub(name, 1, #KEY.user) ~= KEY.user then
      redis.call('HDEL', key(KEY.task_specs), name)
    end
  end
end
for _, task in ipairs(request.tasks) do
  redis.call('HSET', key(KEY.task_specs), task[1], task[2])
  ensure_group(KEY.tasks .. task[1])
end
return 1
