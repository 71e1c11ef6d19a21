-- Setting strings that have one lifetime together, for the scripts that include it.

-- Set a list of keys and values, behind `condition` if there is one, by MSETEX. Only Redis 8.4, Valkey 9.1 and newer have
-- it, and not every user has the right to it, so that is asked for first: a command that fails would be counted in INFO, or in
-- the log of refusals. Returns whether all have been set.
local function set_together(strings, lifetime, condition)
  local size = #strings
  if size < 4 or not redis.acl_check_cmd then
    return false
  end
  -- For a command that it does not know, the server raises an error.
  local is_known, is_allowed = pcall(redis.acl_check_cmd, 'MSETEX', '1', strings[1], '', 'PX', lifetime)
  if not (is_known and is_allowed) then
    return false
  end
  -- In this order in the documentation of both.
  local options = condition and {condition, 'PX', lifetime} or {'PX', lifetime}
  for at, option in ipairs(options) do
    strings[size + at] = option
  end
  local are_set = redis.pcall('MSETEX', size / 2, unpack(strings)) == 1
  for at in ipairs(options) do
    strings[size + at] = nil
  end
  return are_set
end
