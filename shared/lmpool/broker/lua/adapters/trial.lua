-- Note that a worker is about to load an adapter, so that others see when that has ended it.
--
-- KEYS  who loads this very adapter now: a hash of worker ids, each with the time when it began in ms since 1970, or 0
--       when it said that it ends over it
-- ARGV  worker id; "alone" if it loads only when nobody else does, "any" if only those matter who should have ended
--       by now, "anyway"; after how many ms somebody should have; lifetime of the note in ms; most that there can be
--
-- Returns 1 when noted, else 0, and behind it who should have ended by now.

-- include time

local worker, how, most_ms = ARGV[1], ARGV[2], tonumber(ARGV[3])
if redis.call('HLEN', KEYS[1]) > tonumber(ARGV[5]) then
  redis.call('DEL', KEYS[1])
end
local now = now_ms()
local result, others = {0}, 0
local all = redis.call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
  if all[i] ~= worker then
    others = others + 1
    if now - (tonumber(all[i + 1]) or 0) >= most_ms then
      result[#result + 1] = all[i]
    end
  end
end
if how == 'anyway' or others == 0 or (how == 'any' and #result == 1) then
  redis.call('HSET', KEYS[1], worker, now)
  redis.call('PEXPIRE', KEYS[1], ARGV[4])
  result[1] = 1
end
return result
