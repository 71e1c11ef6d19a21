-- Read a few entries of rows, without the rows leaving the server.
--
-- KEYS  row keys
-- ARGV  the encoding that is expected, then per row: first and last byte of the number of each entry in a row of that
--       encoding, all with spaces between
--
-- Returns per row the header and then the stored numbers of those entries; nil when there is no such row. A row in
-- another encoding, or one that is too short, has its header alone, for who asked to fetch it as it is. What is there may be anything: who
-- asked checks the header and the length.
local HEADER, ENCODING = 16, 6
local expected = tonumber(ARGV[1])
local found = {}
for i, row in ipairs(KEYS) do
  local header = redis.pcall('GETRANGE', row, 0, HEADER - 1)
  if header == '' then
    found[i] = false
  elseif type(header) == 'table' then
    found[i] = ''
  elseif string.byte(header, ENCODING) ~= expected then
    found[i] = header
  else
    local parts = {header}
    for from, to in string.gmatch(ARGV[1 + i], '(%d+) (%d+)') do
      local number = redis.call('GETRANGE', row, from, to)
      if #number ~= to - from + 1 then
        parts = {header}
        break
      end
      parts[#parts + 1] = number
    end
    found[i] = table.concat(parts)
  end
end
return found
