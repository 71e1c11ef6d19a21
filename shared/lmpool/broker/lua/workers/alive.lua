-- Count the workers of a model that are alive: those whose deadlines have not passed.
--
-- KEYS  deadlines of those that serve it, of those that load it
-- ARGV  the longest lease in ms, most workers to name
--
-- A deadline further away than a lease is none: the server's clock has been set back since.
--
-- Returns how many serve it, how many load it, and the names of those that serve it.

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
    -- A value of another type: the next heartbeat puts it right.
    counts[i] = 0
  end
end
if counts[1] > 0 and most > 0 then
  names = redis.call('ZRANGEBYSCORE', KEYS[1], now, last, 'LIMIT', 0, most)
end
return {counts[1], counts[2], names}
