-- Count the workers of a model whose deadlines have not passed.
--
-- KEYS  deadlines of the workers that serve it, of the workers that load it
-- ARGV  the longest lease in ms, max workers to name
--
-- A deadline further away than the longest lease does not count: the server's clock was set back.
--
-- Returns how many serve the model, how many load it, and the names of the workers that serve it.

-- include time

local now = now_ms()
local last = now + ARGV[1]
local counts, most, names = {}, tonumber(ARGV[2]), {}
for i, key in ipairs(KEYS) do
  counts[i] = redis.pcall('ZCOUNT', key, now, last)
  if type(counts[i]) == 'table' then
    if not string.find(tostring(counts[i].err), 'WRONGTYPE', 1, true) then
      return counts[i]
    end
    -- The next heartbeat replaces a value of another type.
    counts[i] = 0
  end
end
if counts[1] > 0 and most > 0 then
  names = redis.call('ZRANGEBYSCORE', KEYS[1], now, last, 'LIMIT', 0, most)
end
return {counts[1], counts[2], names}
