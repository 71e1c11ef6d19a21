-- Count the workers of a model whose deadlines have not passed. A deadline further away than the longest lease does not count: the
-- server's clock was set back.
--
-- KEYS  deadlines of the workers that serve it, of the workers that load it
-- ARGV  the longest lease in ms, max workers to name
--
-- Returns how many serve the model, how many load it, and the names of the workers that serve it.

-- include time

local now, counts, names = now_ms(), {}, {}
for i, key in ipairs(KEYS) do
  local count = redis.pcall('ZCOUNT', key, now, now + ARGV[1])
  if type(count) == 'table' and not string.find(tostring(count.err), 'WRONGTYPE', 1, true) then
    return count
  end
  -- The next heartbeat replaces a value of another type.
  counts[i] = type(count) == 'number' and count or 0
end
if counts[1] > 0 and ARGV[2] ~= '0' then
  names = redis.call('ZRANGEBYSCORE', KEYS[1], now, now + ARGV[1], 'LIMIT', 0, ARGV[2])
end
return {counts[1], counts[2], names}
