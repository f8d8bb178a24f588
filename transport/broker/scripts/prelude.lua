-- Put in front of every script by redis_link.py, after the line that names the broker's own keys (KEY).
--
-- KEYS[1]  the caller's session slot (or, in a script that is not sent once, any key of the run)
-- ARGV[1]  what every key of the run starts with; they share one hash tag, hence one cluster slot
-- ARGV[2]  the number of this request in its slot
-- ARGV[3]  the request, JSON (so that MONITOR and SLOWLOG can be read)
-- ARGV[4]  the id of the run that the caller is of; '': it is of none, and nothing is compared
-- ARGV[5]  and on: binary values; in a list of the request a number stands for ARGV[number]

local PREFIX = ARGV[1]
local RUN_ID = ARGV[4]
-- The one consumer group of every work queue. It carries the run's id, so that a blocking read of another run, which
-- no script can refuse, finds no group.
local GROUP = RUN_ID == '' and KEY.workers_group or KEY.workers_group .. '-' .. RUN_ID
local SESSION_TTL_S = 3600 -- far longer than any client tries one request again

local function key(name)
  return PREFIX .. name
end

-- nil when the caller's run has the name, or the caller is of none; else the error reply.
local function refuse_other_run()
  local id = RUN_ID ~= '' and redis.call('HGET', key(KEY.owner), 'run_id')
  if RUN_ID == '' or id == RUN_ID then
    return nil
  end
  return redis.error_reply(id and 'OTHERRUN ' .. id or 'NORUN')
end

-- Milliseconds of this server's clock; '' where the broker's user may not ask (an access list of an earlier version).
local function now_ms()
  local time = redis.pcall('TIME')
  return time.err and '' or string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
end

-- Claim the name for a start of a run ({run_id, start, ...}), or renew the claim. after: the start that it follows.
-- nil when it is the caller's now, else the error reply, and nothing was changed.
local function hold_run(claim, after)
  local owner = key(KEY.owner)
  local id, start = unpack(redis.call('HMGET', owner, 'run_id', 'start'))
  if id and (id ~= claim.run_id or start ~= claim.start and start ~= after) then
    return redis.error_reply('OTHERRUN ' .. id)
  end
  if start ~= claim.start then
    redis.call('HSET', owner, 'since_ms', now_ms())
    for name, value in pairs(claim) do
      redis.call('HSET', owner, name, value)
    end
  end
  if not id then
    -- Queues of a run of an earlier version: what waits in them, or was held, is handed out anew.
    for _, stream in ipairs(redis.call('SMEMBERS', key(KEY.streams))) do
      local groups = redis.pcall('XINFO', 'GROUPS', key(stream))
      if not groups.err and #groups > 0 then
        redis.pcall('XGROUP', 'CREATE', key(stream), GROUP, '0') -- BUSYGROUP: there already
      end
    end
  end
  redis.call('SET', key(KEY.owner_alive), claim.start, 'PX', KEY.alive_ms)
  return nil
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
