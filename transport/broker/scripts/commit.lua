-- The one atomic step: groups, rows with what they append and complete, acks, appends.
-- Request: fence?, groups {key, size, columns}, rows {key, group_key, row_id, group_id, sample, columns, on_insert},
--          blocks {groups, size, columns, shared, values: a number for ARGV, lengths}, acks {queue, id},
--          appends {stream, fields}, if_held (1 or 0).
-- Reply: {retained bytes, {1 or 0 per row, then per row of the blocks}}.

local written_bytes = 0

-- Write columns {name, value, ...} into a hash.  Returns their bytes.
local function write_hash(hash, columns)
  local bytes = 0
  for i = 2, #columns, 2 do
    bytes = bytes + #columns[i]
  end
  if #columns > 0 then
    redis.call('HSET', hash, unpack(columns))
  end
  return bytes
end

-- Count bytes in a group's hash and in the run's total.
local function count_bytes(group_key, bytes)
  redis.call('HINCRBY', group_key, 'bytes', bytes)
  written_bytes = written_bytes + bytes
end

local function write_columns(hash, group_key, columns)
  count_bytes(group_key, write_hash(hash, resolve(columns)))
end

local function insert_group(group)
  local group_key, size, columns = unpack(group)
  if redis.call('HSETNX', group_key, 'size', size) == 1 then
    write_columns(group_key, group_key, columns)
  end
end

local function has(row_key, group_key, column)
  return redis.call('HEXISTS', row_key, column) == 1
    or is_users(column) and redis.call('HEXISTS', group_key, KEY.shared .. column) == 1
end

local function may_insert(row_key, group_key, sample, columns)
  local size = redis.call('HGET', group_key, 'size')
  if not size or sample >= tonumber(size) then
    return false
  end
  for i = 1, #columns, 2 do
    if has(row_key, group_key, columns[i]) then
      return false
    end
  end
  return true
end

local function has_all(row_key, group_key, columns)
  for _, column in ipairs(columns) do
    if not has(row_key, group_key, column) then
      return false
    end
  end
  return true
end

local function notify(task, unit, group_id)
  local queue = KEY.tasks .. task
  ensure_group(queue)
  return add(queue, '*', { 'task', task, 'unit', unit, 'group', group_id })
end

-- Mark the row for every task whose columns are now all there, once, and notice the units that this completes. The mark
-- of a unit's notice is its id, should the row be withdrawn.
local function complete_units(specs, row_key, group_key, row_id, group_id)
  for task, spec in pairs(specs) do
    local mark = KEY.ready .. task
    if has_all(row_key, group_key, spec.reads) and redis.call('HSETNX', row_key, mark, '1') == 1 then
      if spec.unit == 'sample' then
        redis.call('HSET', row_key, mark, notify(task, row_id, group_id))
      else
        local ready = redis.call('HINCRBY', group_key, mark, 1)
        if ready == tonumber(redis.call('HGET', group_key, 'size')) then
          redis.call('HSET', group_key, KEY.noticed .. task, notify(task, group_id, group_id))
        end
      end
    end
  end
end

local function insert_row(row, specs)
  local row_key, group_key, row_id, group_id, sample, columns, on_insert = unpack(row)
  if not may_insert(row_key, group_key, sample, columns) then
    return 0
  end
  write_columns(row_key, group_key, columns)
  add_all(on_insert)
  complete_units(specs, row_key, group_key, row_id, group_id)
  return 1
end

-- A function that gives the columns {name, value, ...} of one row (or group) of a block after another.
local function rows_of(block)
  local values, place, start = ARGV[block.values], 0, 1
  return function()
    local columns = {}
    for i, name in ipairs(block.columns) do
      local length = block.lengths[place + i]
      columns[2 * i - 1] = name
      columns[2 * i] = string.sub(values, start, start + length - 1)
      start = start + length
    end
    place = place + #block.columns
    return columns
  end
end

-- Columns {name, value, ...} under the names that they have in the hash of a group, for all of its rows.
local function of_all_rows(columns)
  local named = {}
  for i = 1, #columns, 2 do
    named[i], named[i + 1] = KEY.shared .. columns[i], columns[i + 1]
  end
  return named
end

-- Insert a block by the rules of groups and rows; in a group that is new with it, no row can be there yet, and what its
-- rows share is kept once.
local function insert_block(block, specs, inserted)
  local next_columns, has_tasks = rows_of(block), next(specs) ~= nil
  for _, group_id in ipairs(block.groups) do
    local group_key, bytes = key(KEY.group .. group_id), 0
    local is_new = redis.call('HSETNX', group_key, 'size', block.size) == 1
    local shared = block.shared and next_columns()
    local is_written = is_new and shared
    if is_written then
      bytes = write_hash(group_key, of_all_rows(shared))
    end
    for sample = 0, block.size - 1 do
      if is_written and not has_tasks then
        inserted[#inserted + 1] = 1
      else
        local columns, row_id = shared or next_columns(), group_id .. '/' .. sample
        local row_key = key(KEY.row .. row_id)
        local wins = is_new or may_insert(row_key, group_key, sample, columns)
        inserted[#inserted + 1] = wins and 1 or 0
        if wins then
          if not is_written then
            bytes = bytes + write_hash(row_key, columns)
          end
          complete_units(specs, row_key, group_key, row_id, group_id)
        end
      end
    end
    count_bytes(group_key, bytes)
  end
end

local function holds_all(acks)
  for _, ack in ipairs(acks) do
    if not is_pending(ack[1], ack[2]) then
      return false
    end
  end
  return true
end

local function none_of(request)
  local number, inserted = #request.rows, {}
  for _, block in ipairs(request.blocks) do
    number = number + #block.groups * block.size
  end
  for i = 1, number do
    inserted[i] = 0
  end
  return inserted
end

return once(function(request)
  local refused = refuse_fence(request.fence)
  if refused then
    return refused
  end
  if request.if_held == 1 and not holds_all(request.acks) then
    return { redis.call('INCRBY', key(KEY.retained_bytes), 0), none_of(request) }
  end
  for _, group in ipairs(request.groups) do
    insert_group(group)
  end
  local specs = (#request.rows > 0 or #request.blocks > 0) and task_specs() or {}
  local inserted = {}
  for i, row in ipairs(request.rows) do
    inserted[i] = insert_row(row, specs)
  end
  for _, block in ipairs(request.blocks) do
    insert_block(block, specs, inserted)
  end
  for _, ack in ipairs(request.acks) do
    acknowledge(ack[1], ack[2])
  end
  add_all(request.appends)
  return { redis.call('INCRBY', key(KEY.retained_bytes), written_bytes), inserted }
end)
