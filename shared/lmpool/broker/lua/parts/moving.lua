-- Moving jobs that no worker was given yet to another stream, for the scripts that include it.

-- include lanes
-- include waiting

-- Max entries read per command, because one job may have 16 MiB; max lanes that one call visits.
local MAX_PART, MAX_LANES = 16, 8
-- Max jobs that one call moves, and the bytes that it may still move.
local MAX_MOVED, bytes_left = 128, 524288
-- Digits of a time in ms; bytes of a digest. Longer values in an entry are not ours.
local MAX_DIGITS, DIGEST_BYTES = 15, 16

-- The workers with the longest lanes, the longest first.
local function longest_lanes()
  local workers = {}
  -- One more is read, because the sum is among them.
  for _, worker in ipairs(redis.pcall('ZREVRANGE', lanes, 0, MAX_LANES)) do
    if worker ~= '' and #workers < MAX_LANES then
      workers[#workers + 1] = worker
    end
  end
  return workers
end

-- The job in an entry.
local function read_entry(entry, suffix)
  local values = {}
  for at = 1, #entry[2], 2 do
    values[entry[2][at]] = entry[2][at + 1]
  end
  local lifetime, digest = string.match(values.u or '', '^(%d+) (.+)$')
  local is_valid = digest and #lifetime <= MAX_DIGITS and #digest == DIGEST_BYTES
  return {
    entry = entry[1] .. suffix, job = values.m or '', home = values.h or '',
    since = string.match(values.t or entry[1], '^%d+') or '0', lifetime = is_valid and lifetime,
    digest = is_valid and digest, kind = (values.p == BULK or values.p == CONTINUED) and values.p or nil,
  }
end

-- Up to `most` jobs of a lane, or of the shared stream for nil, that no worker was given: the first ones, or the last ones in reverse
-- order, up to a job for which `is_end` is true. They stay until `remove_entries`: after an error, two copies are better than none.
local function find_to_move(worker, most, is_from_end, is_end)
  local stream, suffix = worker and lane_of .. worker or jobs, worker and ' ' .. worker or ''
  local command, from, to, found = 'XRANGE', '(' .. group_at(stream)['last-delivered-id'], '+', {}
  if is_from_end then
    command, from, to = 'XREVRANGE', to, from
  end
  while #found < most and bytes_left > 0 do
    local part = redis.pcall(command, stream, from, to, 'COUNT', math.min(most - #found, #found + 1, MAX_PART))
    if #part == 0 then
      return found
    end
    for _, entry in ipairs(part) do
      local job = read_entry(entry, suffix)
      if is_end and is_end(job) then
        return found
      end
      found[#found + 1], bytes_left = job, bytes_left - #job.job
    end
    from = '(' .. part[#part][1]
  end
  return found
end

-- Move jobs to the lane of a worker, or to the shared stream for nil, in the order of the list.
local function move(worker, moved)
  local entries = {}
  for at, job in ipairs(moved) do
    entries[at] = job.entry
    if job.digest then
      local tag = job.lifetime .. ' ' .. job.digest
      local entry = add_job(worker, job.kind, 'm', job.job, 'u', tag, 't', job.since, 'h', job.home)
      -- The clients may have submitted the prompt again, and wait for another job.
      place(waiting_for .. job.digest, entry, job.lifetime, job.entry)
    else
      add_job(worker, job.kind, 'm', job.job, 't', job.since)
    end
  end
  count_added()
  remove_entries(entries)
end

-- Close the lane of a worker: move up to `most` jobs that it was not given to the shared stream, the oldest first. Returns how
-- many were moved. If there were any, there may be more.
local function close_lane(worker, most)
  local size = tonumber(redis.pcall('HGET', capacities, worker))
  if size then
    -- No job is placed in the lane of a worker without capacity.
    redis.call('HDEL', capacities, worker)
    redis.pcall('HINCRBY', capacities, '', -size)
  end
  local moved = find_to_move(worker, most, false)
  move(nil, moved)
  return #moved
end
