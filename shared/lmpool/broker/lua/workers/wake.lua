-- End a read of a worker that waits for jobs: add an entry to its lane. Or remove such entries.
--
-- KEYS  jobs
-- ARGV  worker, then the ids of the entries to remove

-- include streams

local entries = {}
for i = 2, #ARGV do
  entries[i - 1] = ARGV[i] .. ' ' .. ARGV[1]
end
if #entries > 0 then
  return remove_entries(entries, true)
end
add_wake(ARGV[1], 0)
return 1
