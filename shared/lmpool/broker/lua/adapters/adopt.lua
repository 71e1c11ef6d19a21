-- Put an adapter in service, or take one out: over the very state of the registry that the caller has seen.
--
-- KEYS  adapters, offers, what is there as long as clients may use another adapter of this name
-- ARGV  fingerprint of the model, generation of that state ('' for none), name, the offer as the caller saw it ('' for
--       none: then the name must be free), encoded adapter ('' takes out what there is), for how long clients may use
--       another one in ms, what this change is called, 'clock' to count by the clock
--
-- Returns the new generation; '' when the registry or the offer is another, the name is taken, or nothing to take out.

-- include time

local adapters, offers, seen, name, adapter = KEYS[1], KEYS[2], ARGV[2], ARGV[3], ARGV[5]
local generation = string.match(redis.call('HGET', adapters, '@') or '', '^%S*')
if redis.call('HGET', adapters, '') ~= ARGV[1] or generation ~= seen then
  return ''
end
local before = redis.call('HGET', adapters, name)
if ARGV[4] ~= '' then
  if redis.call('HGET', offers, name) ~= ARGV[4] then
    return ''
  end
elseif (adapter == '') ~= (before ~= false) then
  return ''
end
if before and before ~= adapter then
  redis.call('SET', KEYS[3], '', 'PX', ARGV[6])
end
local number = (tonumber(string.match(seen, '^%d+')) or 0) + 1
if ARGV[8] == 'clock' then
  -- After a failover that has lost a change, the next one counts as later than that.
  number = math.max(number, now_ms(), 1e12)
end
local made = string.format('%.0f-%s', number, ARGV[7])
if adapter == '' then
  redis.call('HDEL', adapters, name)
else
  redis.call('HSET', adapters, name, adapter)
end
redis.call('HSET', adapters, '@', made .. ' ' .. seen)
redis.call('HDEL', offers, name)
return made
