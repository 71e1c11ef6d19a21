-- Write an entry of the registry of a model's adapters, or remove an entry.
--
-- KEYS  adapters
-- ARGV  fingerprint of the model, name, encoded adapter ('' removes the entry), max entries, "new" to write only an entry
--       that does not exist
--
-- Returns the version of the entry, and how many ms ago the entry replaced or removed another entry (-1 if it did not).
-- The version is 0 if there is no entry to remove, and -1 if the registry is full.

-- include time

local adapters, name, adapter, is_new = KEYS[1], ARGV[2], ARGV[3], ARGV[5] == 'new'
local before = redis.call('HGET', adapters, name)
local version = tonumber(redis.call('HGET', adapters, '@')) or 0
if redis.call('HGET', adapters, '') ~= ARGV[1] then
  -- The entries belong to an earlier model of this name: remove them.
  for _, field in ipairs(redis.call('HKEYS', adapters)) do
    redis.call('HDEL', adapters, field)
  end
  redis.call('HSET', adapters, '', ARGV[1])
  before = false
end
if before then
  local written, old = string.match(before, '^(%d+) (.*)$')
  if is_new or old == adapter then
    return {tonumber(written) or 0, math.max(0, now_ms() - (tonumber(written) or 0))}
  end
elseif adapter == '' then
  return {0, -1}
elseif redis.call('HLEN', adapters) - 2 >= tonumber(ARGV[4]) then
  return {-1, -1}
end
-- If a failover lost a change and a client repeats the change, the new version must be higher than the lost version.
version = math.max(version + 1, is_new and 0 or now_ms())
redis.call('HSET', adapters, '@', string.format('%.0f', version))
if adapter == '' then
  redis.call('HDEL', adapters, name)
else
  redis.call('HSET', adapters, name, string.format('%.0f ', version) .. adapter)
end
return {version, before and 0 or -1}
