-- Read a few entries of rows, without the rows leaving the server.
--
-- KEYS  row keys
-- ARGV  per row: numbers of entries, with spaces between
--
-- Returns per row the header and then the stored numbers of those entries; nil when there is no such row. What
-- is there may be anything: who asked checks the header and the length.
local HEADER, ENCODING, F32 = 16, 6, 1
local found = {}
for i, row in ipairs(KEYS) do
  local header = redis.pcall('GETRANGE', row, 0, HEADER - 1)
  if header == '' then
    found[i] = false
  elseif type(header) == 'table' or #header < HEADER then
    found[i] = ''
  else
    local width = string.byte(header, ENCODING) == F32 and 4 or 2
    local parts = {header}
    for number in string.gmatch(ARGV[i], '%d+') do
      local from = HEADER + number * width
      parts[#parts + 1] = redis.call('GETRANGE', row, from, from + width - 1)
    end
    found[i] = table.concat(parts)
  end
end
return found
