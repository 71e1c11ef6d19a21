-- Requeue the jobs of a worker that ends: the worker or its supervisor makes them look expired, so that other workers claim them.
--
-- KEYS  jobs or a lane, reasons
-- ARGV  consumer group, consumer, idle time to set in ms, max jobs in this call, first id ("-" at first), max deliveries of a job,
--       why the worker ends (or ""), lifetime of reasons in ms, max reasons, suffix of entries: "", or a space and the lane's worker
--
-- Jobs keep their numbers of deliveries. A job on its last delivery ran alone, so the reason why the worker ends is stored for it.
--
-- Returns the number of requeued jobs, and the first id of the next call ("" if no job is left).
local stream, reasons = KEYS[1], KEYS[2]
local group, consumer, idle, most = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local held = redis.pcall('XPENDING', stream, group, ARGV[5], '+', most, consumer)
-- If XPENDING fails, the server has lost the queue, and the loop sees no jobs.
for _, job in ipairs(held) do
  local id, deliveries = job[1], job[4]
  redis.call('XCLAIM', stream, group, consumer, 0, id, 'IDLE', idle, 'JUSTID')
  if ARGV[7] ~= '' and deliveries >= tonumber(ARGV[6]) then
    if redis.call('HLEN', reasons) >= tonumber(ARGV[9]) then
      redis.call('UNLINK', reasons)
    end
    redis.call('HSET', reasons, id .. ARGV[10], ARGV[7])
    redis.call('PEXPIRE', reasons, ARGV[8])
  end
end
return {#held, #held == most and '(' .. held[#held][1] or ''}
