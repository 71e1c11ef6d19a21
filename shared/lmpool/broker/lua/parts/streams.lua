-- Find, count and remove jobs in the shared stream and in lanes; other scripts include this file. The entry of a job is its id, and
-- in a lane a space and the worker after the id. The sorted set `lanes` has the numbers of jobs, waiting or held, and under "" their sum.

-- include names

local function is_bulk_client(reply)
  return type(reply) == 'string' and string.find(reply, bulk_replies, 1, true) ~= nil
end

-- The stream and the id of an entry, and the worker if the stream is a lane.
local function locate(entry)
  local space = string.find(entry, ' ', 1, true)
  if space then
    local worker = string.sub(entry, space + 1)
    return lane_of .. worker, string.sub(entry, 1, space - 1), worker
  end
  return jobs, entry, nil
end

local jobs_in_lanes = 0 -- The number of jobs in all lanes, after the last call of `count_in_lane`.

-- Add `more` to the length of a lane that `lanes` lists, and to the sum; negative if jobs were removed.
local function count_in_lane(worker, more)
  if more ~= 0 and type(redis.pcall('ZADD', lanes, 'XX', 'INCR', more, worker)) == 'string' then
    local sum = math.floor(tonumber(redis.pcall('ZINCRBY', lanes, more, '')) or 0)
    jobs_in_lanes = sum < 1e9 and sum or 0 -- Clients may write to the set.
  end
end

-- Add an entry to the lane of a worker that ends the worker's read. It counts as a job until the worker removes it (wake.lua).
local function add_wake(worker, delay)
  if type(redis.pcall('XADD', lane_of .. worker, '*', WAKE, delay)) == 'string' then
    count_in_lane(worker, 1)
  end
end

-- The number of jobs in all lanes. Clients may write to the set, so implausible sums count as 0.
local function in_lanes()
  local sum = tonumber(redis.pcall('ZSCORE', lanes, '')) or 0
  return sum > 0 and sum < 1e9 and sum or 0
end

-- The consumer group of a stream, as XINFO GROUPS describes it. XPENDING would take longer, because it visits all consumers.
local function group_at(stream)
  for _, group in ipairs(redis.pcall('XINFO', 'GROUPS', stream)) do
    local info = {}
    for at = 1, #group, 2 do
      info[group[at]] = group[at + 1]
    end
    if info.name == GROUP then
      return info
    end
  end
  return {consumers = 0, pending = 0, ['last-delivered-id'] = '0-0'}
end

-- Remove entries; if `are_held`, workers may hold them. Returns how many of the entries existed.
local function remove_entries(entries, are_held)
  -- Nearly always all entries are in the shared stream. Entries in lanes have a space.
  local are_shared = #entries > 0 and not string.find(table.concat(entries), ' ', 1, true)
  local ids, workers, removed = are_shared and {[jobs] = entries} or {}, {}, 0
  for _, entry in ipairs(are_shared and {} or entries) do
    local stream, id, worker = locate(entry)
    local of_stream = ids[stream] or {}
    ids[stream], workers[stream], of_stream[#of_stream + 1] = of_stream, worker, id
  end
  for stream, of_stream in pairs(ids) do
    if are_held then
      -- XDEL must follow, because XACK leaves the entry in the stream. XACK fails in scripts of clients without the right to XACK.
      redis.pcall('XACK', stream, GROUP, unpack(of_stream))
    end
    local count = tonumber(redis.pcall('XDEL', stream, unpack(of_stream))) or 0
    if workers[stream] then
      count_in_lane(workers[stream], -count)
    end
    removed = removed + count
  end
  return removed
end
