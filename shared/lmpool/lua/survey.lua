-- Look at the queue of one model.
--
-- KEYS  jobs, dead
--
-- Jobs are removed when they end, so the first entry is the oldest that has not ended; its id carries the server's
-- time of queueing in ms. Not XINFO or a plain XRANGE: they would send that job along.
--
-- Returns {jobs, ms since the oldest was queued (0 when there is none), jobs that were given up, the server's time in
-- ms}.
local jobs, dead = KEYS[1], KEYS[2]
local time = redis.call('TIME')
local now, age = time[1] * 1000 + math.floor(time[2] / 1000), 0
local oldest = redis.call('XRANGE', jobs, '-', '+', 'COUNT', 1)[1]
if oldest then
  age = math.max(0, now - tonumber(string.match(oldest[1], '^%d+')))
end
return {redis.call('XLEN', jobs), age, redis.call('XLEN', dead), now}
