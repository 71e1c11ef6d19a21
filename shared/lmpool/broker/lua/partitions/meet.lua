-- Agree with other clients on the partition in which clients wait for each of some prompts, before submissions to other partitions than
-- this one. submit.lua reads the records for submissions to this partition.
--
-- KEYS  jobs, then per prompt: key with the number of its partition (the record)
-- ARGV  lifetime of the records in ms, partitions that the caller cannot use (" 0 2 "), number of this partition,
--       then per prompt: the partition to propose
--
-- Returns the partition of each prompt: the recorded one if the caller can use it, else this one if clients wait here, else the proposed.

-- include names

local lifetime, unusable, own, partitions = ARGV[1], ARGV[2], ARGV[3], {}

local function is_usable(partition)
  return type(partition) == 'string' and not string.find(unusable, ' ' .. partition .. ' ', 1, true)
end

for i = 2, #KEYS do
  local record, waiting, proposed = KEYS[i], waiting_for .. string.sub(KEYS[i], -16), ARGV[i + 2]
  local partition = redis.pcall('GET', record)
  if is_usable(partition) then
    redis.call('PEXPIRE', record, lifetime)
  else
    local is_waiting = proposed ~= own and is_usable(own) and redis.call('EXISTS', waiting) == 1
    partition = is_waiting and own or proposed
    redis.call('SET', record, partition, 'PX', lifetime)
  end
  partitions[i - 1] = partition
end
return partitions
