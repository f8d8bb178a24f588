-- Put in front of every script by redis_link.py, after the line that names the broker's own keys (KEY).
--
-- KEYS[1]  the caller's session slot (or, in a script that is not sent once, any key of the run)
-- ARGV[1]  what every key of the run starts with; they share one hash tag, hence one cluster slot
-- ARGV[2]  the number of this request in its slot
-- ARGV[3]  the request, JSON (so that MONITOR and SLOWLOG can be read)
-- ARGV[4]  and on: binary values; in a list of the request a number stands for ARGV[number]

local PREFIX = ARGV[1]
local GROUP = 'workers' -- the one consumer group of every work queue
local SESSION_TTL_S = 3600 -- far longer than any client tries one request again

local function key(name)
  return PREFIX .. name
end

-- Run `effect(request)` unless this very request was run before: then give the reply of that time. A request that
-- arrives after a later one of its slot (its client had given it up) is refused. Source: the slot table of NFSv4.1
-- sessions, RFC 8881 section 2.10.6.1: exactly once, with memory bounded by slots, not by time.
local function once(effect)
  local number = tonumber(ARGV[2])
  local stored = redis.call('GET', KEYS[1])
  if stored then
    local last = cmsgpack.unpack(stored)
    if last[1] == number then
      return last[2]
    elseif last[1] > number then
      return redis.error_reply('OUTDATED request ' .. number .. ' after ' .. last[1])
    end
  end
  local reply = effect(cjson.decode(ARGV[3]))
  if type(reply) == 'table' and reply.err then
    return reply -- refused before anything was written
  end
  redis.call('SET', KEYS[1], cmsgpack.pack({ number, reply }), 'EX', SESSION_TTL_S)
  return reply
end

-- Replace the numbers in a list by the binary values they stand for.
local function resolve(list)
  for i, value in ipairs(list) do
    if type(value) == 'number' then
      list[i] = ARGV[value]
    end
  end
  return list
end

-- Whether a column is a user's: only those can be in the hash of the group, for all of its rows.
local function is_users(column)
  return string.sub(column, 1, #KEY.user) == KEY.user
end

-- nil when `fence` ({role, epoch} or nil) may write, else the error reply.
local function refuse_fence(fence)
  if not fence then
    return nil
  end
  local current = tonumber(redis.call('HGET', key(KEY.epochs), fence[1]) or '0')
  if fence[2] < current then
    return redis.error_reply('FENCED ' .. fence[1] .. ' ' .. current)
  elseif fence[2] > current then
    redis.call('HSET', key(KEY.epochs), fence[1], fence[2])
  end
  return nil
end

local function task_specs()
  local specs = {}
  local stored = redis.call('HGETALL', key(KEY.task_specs))
  for i = 1, #stored, 2 do
    specs[stored[i]] = cjson.decode(stored[i + 1])
  end
  return specs
end

-- Append to a stream. nil when an explicit id was already there.
local function add(stream, id, fields)
  local added = redis.pcall('XADD', key(stream), id, unpack(resolve(fields)))
  if type(added) == 'table' then
    if string.find(added.err, 'equal or smaller', 1, true) then
      return nil
    end
    error(added) -- the table, so that the caller reads the server's own first word: OOM, MISCONF, READONLY
  end
  redis.call('SADD', key(KEY.streams), stream)
  return added
end

local function add_all(appends)
  for _, append in ipairs(appends) do
    add(append[1], '*', append[2])
  end
end

-- A queue's group starts at its first entry, whoever creates it.
local function ensure_group(queue)
  if redis.call('EXISTS', key(queue)) == 0 then
    redis.call('XGROUP', 'CREATE', key(queue), GROUP, '0', 'MKSTREAM')
    redis.call('SADD', key(KEY.streams), queue)
  end
end

-- End a delivery and free its entry. A stream that is no queue has no group and keeps its entry.
local function acknowledge(queue, id)
  if redis.call('XACK', key(queue), GROUP, id) == 1 then
    redis.call('XDEL', key(queue), id)
  end
end

-- Whether somebody holds a delivery: false for a queue that is not there (any more).
local function is_pending(queue, id)
  local found = redis.pcall('XPENDING', key(queue), GROUP, id, id, 1)
  return not found.err and #found > 0
end

-- Give up a pending entry. Its fields are kept, and what is said about them starts with "dead_".
-- Reply: {letter id, fields}, nil when the entry is gone.
local function bury(queue, id, reason)
  local entry = redis.call('XRANGE', key(queue), id, id)[1]
  acknowledge(queue, id)
  if not entry then
    return nil
  end
  local fields = { 'dead_queue', queue, 'dead_id', id, 'dead_reason', reason }
  for _, value in ipairs(entry[2]) do
    fields[#fields + 1] = value
  end
  local letter = redis.call('XADD', key(KEY.dead), 'MAXLEN', KEY.max_dead, '*', unpack(fields))
  redis.call('SADD', key(KEY.streams), KEY.dead)
  return { letter, fields }
end
