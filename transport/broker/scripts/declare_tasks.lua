-- Store the run's tasks in place of former ones.  Request: tasks {name, spec as JSON}.  Reply: 1. Idempotent.

redis.call('DEL', key(KEY.task_specs))
for _, task in ipairs(cjson.decode(ARGV[3]).tasks) do
  redis.call('HSET', key(KEY.task_specs), task[1], task[2])
  ensure_group(KEY.tasks .. task[1])
end
return 1
