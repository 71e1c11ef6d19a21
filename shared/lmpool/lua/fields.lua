-- Read hashes that anybody may have written to: what is larger than it can rightly be is not sent.
--
-- KEYS  hashes
-- ARGV  most fields of a hash, most bytes of a value, then the fields that are wanted (none: all of them)
--
-- Returns per hash a list: of each field that is there its name and its value, or the size of a value over the limit.
-- Of a hash with too many fields it returns how many these are, and -1 when something else than a hash is there.
local NAME = 1024
local most, limit = tonumber(ARGV[1]), tonumber(ARGV[2])
local found = {}
for i = 1, #KEYS do
  local count = redis.pcall('HLEN', KEYS[i])
  local names = {unpack(ARGV, 3)}
  if type(count) == 'table' then
    if not string.find(count.err or 'WRONGTYPE', 'WRONGTYPE', 1, true) then
      return count
    end
    found[i] = -1
  elseif count > most and #names == 0 then
    found[i] = count
  else
    local pairs = {}
    for _, name in ipairs(#names > 0 and names or redis.call('HKEYS', KEYS[i])) do
      local size = redis.call('HSTRLEN', KEYS[i], name)
      local value = size <= limit and redis.call('HGET', KEYS[i], name)
      if #name <= NAME and (value or size > limit) then
        pairs[#pairs + 1] = name
        pairs[#pairs + 1] = value or size
      end
    end
    found[i] = pairs
  end
end
return found
