-- Set strings with one lifetime by one command, MSETEX; other scripts include this file. Returns whether all strings were set. Only
-- Redis 8.4, Valkey 9.1 and newer have MSETEX, and some users may not run it: check first, because failures are counted or logged.
local function set_together(strings, lifetime, condition)
  local size = #strings
  if size < 4 or not redis.acl_check_cmd then
    return false
  end
  -- The server raises an error for a command that it does not have.
  local is_known, is_allowed = pcall(redis.acl_check_cmd, 'MSETEX', '1', strings[1], '', 'PX', lifetime)
  if not (is_known and is_allowed) then
    return false
  end
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
