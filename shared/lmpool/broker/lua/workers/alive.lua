-- Count the workers of a model whose deadlines have not passed. A deadline further away than the longest lease does not count: the
-- server's clock was set back.
--
-- KEYS  deadlines of the workers that serve the model, deadlines of the workers that load it
-- ARGV  the longest lease in ms, max workers to name
--
-- Returns the number of workers that serve the model, the number that load it, and the names of the workers that serve it.

-- include time

local now, counts, names = now_ms(), {}, {}
for i, key in ipairs(KEYS) do
  local count = redis.pcall('ZCOUNT', key, now, now + ARGV[1])
  if type(count) == 'table' and not string.find(tostring(count.err), 'WRONGTYPE', 1, true) then
    return count
  end
  -- A value of another type counts as no workers; the next heartbeat replaces the value.
  counts[i] = type(count) == 'number' and count or 0
end
if counts[1] > 0 and ARGV[2] ~= '0' then
  names = redis.call('ZRANGEBYSCORE', KEYS[1], now, now + ARGV[1], 'LIMIT', 0, ARGV[2])
end
return {counts[1], counts[2], names}
