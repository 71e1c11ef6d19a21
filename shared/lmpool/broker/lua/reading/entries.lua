-- Read a few entries of rows, without the rows leaving the server.
--
-- KEYS  row keys
-- ARGV  the encoding that is expected, then per row: first and last byte of the number of each entry in a row of that
--       encoding, all with spaces between
--
-- Returns per row the header and then the stored numbers of those entries; nil when there is no such row; a reference to a
-- row in shared memory as it is. A row in
-- another encoding, or one that is not as long as its header says, has its header alone, for the caller to fetch it as
-- it is. What is there may be anything: the caller checks the header. The digest of the prompt follows: bytes that are lost
-- on the way are replaced by those behind them, and so the caller sees it.
local HEADER, ENCODING, SIZE, DIGEST, MAX_REFERENCE = 16, 6, 9, 16, 291
local expected = tonumber(ARGV[1])
local replies = {}
for i, row in ipairs(KEYS) do
  local header = redis.pcall('GETRANGE', row, 0, HEADER - 1)
  if header == '' then
    replies[i] = false
  elseif type(header) == 'table' then
    replies[i] = string.sub(row, -DIGEST)
  elseif string.sub(header, 1, 4) == 'LMPS' then
    replies[i] = redis.call('GETRANGE', row, 0, MAX_REFERENCE) .. string.sub(row, -DIGEST)
  elseif string.byte(header, ENCODING) ~= expected then
    replies[i] = header .. string.sub(row, -DIGEST)
  else
    local parts, width = {header}, nil
    for from, to in string.gmatch(ARGV[1 + i], '(%d+) (%d+)') do
      width = width or to - from + 1
      parts[#parts + 1] = redis.call('GETRANGE', row, from, to)
    end
    local a, b, c, d = string.byte(header, SIZE, SIZE + 3)
    local size = d and a + 256 * (b + 256 * (c + 256 * d))
    if not width or redis.call('STRLEN', row) ~= HEADER + width * (size or 0) then
      parts = {header}
    end
    parts[#parts + 1] = string.sub(row, -DIGEST)
    replies[i] = table.concat(parts)
  end
end
return replies
