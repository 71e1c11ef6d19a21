-- The time, for the scripts that include it.

-- Milliseconds since 1970, by the server's clock.
local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
