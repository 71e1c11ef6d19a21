-- Move jobs that were not delivered to a worker yet from one stream to another; other scripts include this file.

-- include lanes
-- include waiting

local MAX_PART = 16 -- Max entries read per command, because one job may have 16 MiB.
local MAX_LANES = 8 -- Max lanes that one call visits.
local MAX_MOVED = 128 -- Max jobs that one call moves.
local bytes_left = 524288 -- Bytes of jobs that this call may still move.
local MAX_DIGITS = 15 -- Max digits of a time in ms. A longer value in an entry was not written by lmpool.
local DIGEST_BYTES = 16 -- Size of a digest.

-- The workers with the longest lanes, the longest first, and the lengths of these lanes.
local function longest_lanes()
  local workers, found = {}, {}
  -- Read one member more than MAX_LANES, because the sum of the lengths, under "", is a member too.
  local scores = redis.pcall('ZREVRANGE', lanes, 0, MAX_LANES, 'WITHSCORES')
  for at = 1, #scores, 2 do
    if scores[at] ~= '' and #workers < MAX_LANES then
      workers[#workers + 1], found[#found + 1] = scores[at], read_length(scores[at + 1])
    end
  end
  return workers, found
end

-- The job in an entry of a stream, as a table.
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

-- Find up to `most` undelivered jobs of a worker's lane (nil: of the shared stream), from the first job on or from the last job back.
-- Stop before a job for which `is_end` is true. The entries stay until `remove_entries`, so an error may copy a job but not lose it.
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
      if entry[2][1] == WAKE then
        -- From the first job on, the lane is closed: its worker does not read the entry any more.
        if not is_from_end then
          remove_entries({job.entry})
        end
      elseif is_end and is_end(job) then
        return found
      else
        found[#found + 1], bytes_left = job, bytes_left - #job.job
      end
    end
    from = '(' .. part[#part][1]
  end
  return found
end

-- Move the jobs of a list, in this order, to the lane of a worker, or to the shared stream if `worker` is nil.
local function move(worker, moved)
  local entries = {}
  for at, job in ipairs(moved) do
    entries[at] = job.entry
    if job.digest then
      local tag = job.lifetime .. ' ' .. job.digest
      local entry = add_job(worker, job.kind, 'm', job.job, 'u', tag, 't', job.since, 'h', job.home)
      -- `place` does nothing if the clients have submitted the prompt again and wait for another job.
      place(waiting_for .. job.digest, entry, job.lifetime, job.entry)
    else
      add_job(worker, job.kind, 'm', job.job, 't', job.since)
    end
  end
  count_added()
  remove_entries(entries)
end

-- Close a worker's lane: move up to `most` undelivered jobs, the oldest first, to the shared stream. Returns the number of moved jobs.
local function close_lane(worker, most)
  local size = tonumber(redis.pcall('HGET', capacities, worker))
  if size then
    -- Without a capacity, the worker gets no more jobs in its lane.
    redis.call('HDEL', capacities, worker)
    redis.pcall('HINCRBY', capacities, '', -size)
  end
  local moved = find_to_move(worker, most, false)
  move(nil, moved)
  return #moved
end
