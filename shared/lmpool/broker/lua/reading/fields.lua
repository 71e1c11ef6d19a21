-- Read hashes that any client may have written to, without sending values that are too large. One call reads up to MAX_FIELDS fields or
-- MAX_BYTES of each hash.
--
-- KEYS  hashes
-- ARGV  max fields of a hash, max bytes of a value, index of the first field (0 in the first call), then the fields to read (none: all)
--
-- Returns the index for the next call (0 if all fields were read), and per hash a list of names and values. The size of a value that is
-- too large replaces the value. The number of fields replaces the list of a hash with too many; -1 stands for a key that holds no hash.
local MAX_NAME, MAX_FIELDS, MAX_BYTES = 1024, 1000, 1048576 -- Fields with names over MAX_NAME bytes are left out.
local most, limit, begin = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local replies, wanted, next_begin = {}, {unpack(ARGV, 4)}, 0

local function read(key)
  local values, bytes, names = {}, 0, #wanted > 0 and wanted or redis.call('HKEYS', key)
  for at = begin + 1, #names do
    if at > begin + MAX_FIELDS or bytes > MAX_BYTES then
      next_begin = next_begin == 0 and at - 1 or math.min(next_begin, at - 1)
      return values
    end
    local name = names[at]
    local size = redis.call('HSTRLEN', key, name)
    local value = size <= limit and redis.call('HGET', key, name)
    if #name <= MAX_NAME and (value or size > limit) then
      values[#values + 1], values[#values + 2] = name, value or size
    end
    bytes = bytes + (value and size or 0)
  end
  return values
end

for i, key in ipairs(KEYS) do
  local count = redis.pcall('HLEN', key)
  if type(count) == 'table' then
    if not string.find(count.err or 'WRONGTYPE', 'WRONGTYPE', 1, true) then
      return count
    end
    replies[i] = -1
  elseif count > most and #wanted == 0 then
    replies[i] = count
  else
    replies[i] = read(key)
  end
end
return {next_begin, replies}
