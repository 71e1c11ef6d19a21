-- Read hashes that anybody may have written to: what is larger than it can rightly be is not sent.
--
-- KEYS  hashes
-- ARGV  most fields of a hash, most bytes of a value, where to begin (0 at first), then the fields that are wanted (none: all
--       of them)
--
-- One call reads so many fields, and so many bytes, as it soon can; where that ends, the next one of them begins.
--
-- Returns where that is (0: all has been read), and per hash a list: of each field that is there its name and its value, or
-- the size of a value over the limit. Of a hash with too many fields it returns how many these are, and -1 when something
-- else than a hash is there.
local NAME, PART, PART_BYTES = 1024, 1000, 1048576
local most, limit, begin = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local replies, wanted, next_begin = {}, {unpack(ARGV, 4)}, 0
for i = 1, #KEYS do
  local count = redis.pcall('HLEN', KEYS[i])
  if type(count) == 'table' then
    if not string.find(count.err or 'WRONGTYPE', 'WRONGTYPE', 1, true) then
      return count
    end
    replies[i] = -1
  elseif count > most and #wanted == 0 then
    replies[i] = count
  else
    local pairs, bytes, names = {}, 0, #wanted > 0 and wanted or redis.call('HKEYS', KEYS[i])
    for at = begin + 1, #names do
      if at > begin + PART or bytes > PART_BYTES then
        next_begin = next_begin == 0 and at - 1 or math.min(next_begin, at - 1)
        break
      end
      local name = names[at]
      local size = redis.call('HSTRLEN', KEYS[i], name)
      local value = size <= limit and redis.call('HGET', KEYS[i], name)
      if #name <= NAME and (value or size > limit) then
        pairs[#pairs + 1] = name
        pairs[#pairs + 1] = value or size
      end
      bytes = bytes + (value and size or 0)
    end
    replies[i] = pairs
  end
end
return {next_begin, replies}
