-- Take rows out that have a value which is known to be of no use: they may be inserted anew, and count anew for tasks.
-- Request: rows {row_key, group_key, what the group's row keys start with, column, value, on_withdrawn}.  Reply: 1 or 0 per row.
-- A notice that the row had completed goes, held or not, so that nothing worked out from the row is written any more;
-- and so does what a task of the whole group wrote into the others.

local freed_bytes = 0

local function remove(hash, group_key, columns)
  local bytes = 0
  for _, column in ipairs(columns) do
    bytes = bytes + redis.call('HSTRLEN', hash, column)
  end
  if bytes > 0 then -- Lua writes no bytes less as "-0"
    redis.call('HDEL', hash, unpack(columns))
    redis.call('HINCRBY', group_key, 'bytes', -bytes)
    freed_bytes = freed_bytes + bytes
  end
end

local function columns_of(hash)
  local columns = {}
  for _, name in ipairs(redis.call('HKEYS', hash)) do
    if string.sub(name, 1, #KEY.ready) ~= KEY.ready then
      columns[#columns + 1] = name
    end
  end
  return columns
end

-- Whether it was delivered already or not.
local function take_back(queue, id)
  redis.call('XACK', key(queue), GROUP, id)
  redis.call('XDEL', key(queue), id)
end

local function take_notice_back(task, spec, row_key, group_key, row_prefix)
  local mark = redis.call('HGET', row_key, KEY.ready .. task)
  if not mark then
    return
  elseif spec.unit == 'sample' then
    take_back(KEY.tasks .. task, mark)
    return
  end
  redis.call('HINCRBY', group_key, KEY.ready .. task, -1)
  local notice = redis.call('HGET', group_key, KEY.noticed .. task)
  if notice then
    redis.call('HDEL', group_key, KEY.noticed .. task)
    take_back(KEY.tasks .. task, notice)
    for sample = 0, tonumber(redis.call('HGET', group_key, 'size')) - 1 do
      remove(row_prefix .. sample, group_key, spec.writes or {})
    end
  end
end

return once(function(request)
  local specs, withdrawn = task_specs(), {}
  for i, row in ipairs(request.rows) do
    local row_key, group_key, row_prefix, column, value, on_withdrawn = unpack(resolve(row))
    withdrawn[i] = 0
    if redis.call('HGET', row_key, column) == value then
      for task, spec in pairs(specs) do
        take_notice_back(task, spec, row_key, group_key, row_prefix)
      end
      remove(row_key, group_key, columns_of(row_key))
      redis.call('UNLINK', row_key)
      add_all(on_withdrawn)
      withdrawn[i] = 1
    end
  end
  redis.call('DECRBY', key(KEY.retained_bytes), freed_bytes)
  return withdrawn
end)
