-- The id of the last entry ever added.  Request: stream.  In Lua because XINFO STREAM also carries two whole entries.

local info = redis.pcall('XINFO', 'STREAM', key(cjson.decode(ARGV[3]).stream))
if info.err then
  return '0-0' -- no such stream
end
for i = 1, #info, 2 do
  if info[i] == 'last-generated-id' then
    return info[i + 1]
  end
end
