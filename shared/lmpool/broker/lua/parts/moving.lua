-- Moving jobs that no worker has been given yet between streams, for the scripts that include it. See lanes.lua.

-- include lanes
-- include waiting

-- How many entries are read at a time, for each may be large; how many of a stream are moved; digits of a time in ms; a digest.
local PART, MAX_MOVED_AT_ONCE, MAX_DIGITS, DIGEST_BYTES = 4, 128, 15, 16
-- At how many lanes one call looks.
local MAX_LANES = 8
-- How many bytes this call may still move.
local bytes_left = 524288

-- The workers with the longest lanes, the longest first.
local function longest_lanes()
  local workers = {}
  -- One more: the sum stands among them.
  for _, worker in ipairs(redis.pcall('ZREVRANGE', lanes, 0, MAX_LANES)) do
    if worker ~= '' and #workers < MAX_LANES then
      workers[#workers + 1] = worker
    end
  end
  return workers
end

-- What an entry says, and how many bytes its job has.
local function read_entry(entry, suffix)
  local values = {}
  for at = 1, #entry[2], 2 do
    values[entry[2][at]] = entry[2][at + 1]
  end
  local lifetime, digest = string.match(values.u or '', '^(%d+) (.+)$')
  local is_known = digest and #lifetime <= MAX_DIGITS and #digest == DIGEST_BYTES
  local since = string.match(values.t or entry[1], '^%d+') or '0'
  return {
    entry = entry[1] .. suffix, job = values.m or '', since = since, home = values.h or '',
    lifetime = is_known and lifetime, digest = is_known and digest,
    kind = (values.p == BULK or values.p == CONTINUED) and values.p or nil,
  }
end

-- At most `most` jobs of a stream that no worker has been given: from its end, the last first, or from its beginning.
-- Of each that comes next `judge` says whether it is one; nil ends it. Returns the jobs, and how many were looked at. They stay
-- until `remove_moved`, when they have been added elsewhere: where that fails, a job that is there twice beats one that is gone.
local function find_to_move(worker, most, is_from_end, judge)
  local stream, suffix = jobs, ''
  if worker then
    stream, suffix = lane_of .. worker, ' ' .. worker
  end
  local first, last = '(' .. group_at(stream)['last-delivered-id'], '+'
  local taken, seen, goes = {}, 0, true
  most = math.min(most, MAX_MOVED_AT_ONCE)
  while goes ~= nil and seen < most and bytes_left > 0 do
    local count, part = math.min(most - seen, seen + 1, PART), nil
    if is_from_end then
      part = redis.pcall('XREVRANGE', stream, last, first, 'COUNT', count)
    else
      part = redis.pcall('XRANGE', stream, first, last, 'COUNT', count)
    end
    -- Behind the last possible id there is no place to begin at.
    if #part == 0 then
      break
    end
    for _, entry in ipairs(part) do
      local job = read_entry(entry, suffix)
      goes = judge(job)
      if goes == nil then
        break
      elseif goes then
        taken[#taken + 1], job.id, job.number = job, entry[1], seen
      end
      seen, bytes_left = seen + 1, bytes_left - #job.job
      first = is_from_end and first or '(' .. entry[1]
      last = is_from_end and '(' .. entry[1] or last
    end
  end
  return taken, seen
end

-- Remove jobs that are elsewhere now from the stream where they were.
local function remove_moved(worker, taken)
  local ids = {}
  for at, job in ipairs(taken) do
    ids[at] = job.id
  end
  if #ids > 0 then
    local stream = worker and lane_of .. worker or jobs
    local count = redis.call('XDEL', stream, unpack(ids))
    if worker then
      count_in_lane(worker, -count)
    end
  end
end

-- Move jobs from the lane of a worker to that of another, or to the shared stream for nil, in this order of theirs.
local function move(from_worker, worker, taken, from, to, step)
  for at = from, to, step do
    local job = taken[at]
    if not job.digest then
      add_job(worker, job.kind, 'm', job.job, 't', job.since)
    else
      local tag = job.lifetime .. ' ' .. job.digest
      local entry = add_job(worker, job.kind, 'm', job.job, 'u', tag, 't', job.since, 'h', job.home)
      -- Its clients may have asked again meanwhile, and have another job; or a server that is short of memory has dropped the
      -- key, and they will.
      place(waiting_for .. job.digest, entry, job.lifetime, job.entry)
    end
  end
  count_added()
  remove_moved(from_worker, taken)
end

-- Have a worker take nothing more: what it was never given goes to the shared stream, `most` jobs of it. From the beginning of
-- its lane, for what has waited longest goes first. Returns how many were moved; where there are any, there may be more.
local function retire(worker, most)
  local size = tonumber(redis.pcall('HGET', capacities, worker))
  if size then
    -- Nothing is placed in the lane of a worker without capacity.
    redis.call('HDEL', capacities, worker)
    redis.pcall('HINCRBY', capacities, '', -size)
  end
  local taken = find_to_move(worker, most, false, function()
    return true
  end)
  move(worker, nil, taken, 1, #taken, 1)
  return #taken
end
