-- Read single numbers of stored rows, such as the log-probabilities of a few tokens, without sending whole rows.
--
-- KEYS  row keys
-- ARGV  expected encoding, then per row: first and last byte of each number, all separated by spaces
--
-- Returns one string per key (nil if the key does not exist): the row's header, the numbers, and the digest from the key. If bytes are
-- lost on the way, the digest is at the wrong place, so the caller notices. The string for a row with another encoding or length has
-- only header and digest; for a reference to shared memory, reference and digest; for a value of another type, only the digest.
local HEADER_SIZE, ENCODING_AT, SIZE_AT, DIGEST_SIZE, MAX_REFERENCE = 16, 6, 9, 16, 291 -- Bytes; see protocol/row.py.
local expected = tonumber(ARGV[1])
local replies = {}
for i, row in ipairs(KEYS) do
  local header, digest = redis.pcall('GETRANGE', row, 0, HEADER_SIZE - 1), string.sub(row, -DIGEST_SIZE)
  if header == '' then
    replies[i] = false
  elseif type(header) == 'table' then
    replies[i] = digest
  elseif string.sub(header, 1, 4) == 'LMPS' then
    replies[i] = redis.call('GETRANGE', row, 0, MAX_REFERENCE) .. digest
  elseif string.byte(header, ENCODING_AT) ~= expected then
    replies[i] = header .. digest
  else
    local parts, width = {header}, nil
    for from, to in string.gmatch(ARGV[1 + i], '(%d+) (%d+)') do
      width = width or to - from + 1
      parts[#parts + 1] = redis.call('GETRANGE', row, from, to)
    end
    local a, b, c, d = string.byte(header, SIZE_AT, SIZE_AT + 3)
    local size = d and a + 256 * (b + 256 * (c + 256 * d)) or 0
    if not width or redis.call('STRLEN', row) ~= HEADER_SIZE + width * size then
      parts = {header}
    end
    replies[i] = table.concat(parts) .. digest
  end
end
return replies
