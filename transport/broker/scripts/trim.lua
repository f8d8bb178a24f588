-- Free entries up to an id; in a work queue, nothing that is pending or was never delivered.
-- Request: stream, upto.  Reply: how many were freed.

local function parse(id)
  local major, minor = string.match(id, '^(%d+)-(%d+)$')
  return tonumber(major), tonumber(minor)
end

local function lower(a, b)
  local a_major, a_minor = parse(a)
  local b_major, b_minor = parse(b)
  if a_major ~= b_major then
    return a_major < b_major and a or b
  end
  return a_minor < b_minor and a or b
end

local function after(id)
  local major, minor = string.match(id, '^(%d+)-(%d+)$')
  return major .. '-' .. string.format('%.0f', tonumber(minor) + 1)
end

-- The last id that was handed out, and the first that is still held (or nil).
local function delivered_and_held(stream)
  local groups = redis.pcall('XINFO', 'GROUPS', key(stream))
  if groups.err or #groups == 0 then
    return nil
  end
  for _, flat in ipairs(groups) do
    local group = {}
    for i = 1, #flat, 2 do
      group[flat[i]] = flat[i + 1]
    end
    if group.name == GROUP then
      return group['last-delivered-id'], redis.call('XPENDING', key(stream), GROUP)[2]
    end
  end
  return '0-0', nil -- a queue of an earlier version, of which nothing was handed out since
end

return once(function(request)
  local minimum = after(request.upto)
  local delivered, held = delivered_and_held(request.stream)
  if delivered then
    minimum = lower(minimum, after(delivered))
  end
  if held then
    minimum = lower(minimum, held)
  end
  return redis.call('XTRIM', key(request.stream), 'MINID', minimum)
end)
