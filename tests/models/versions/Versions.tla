---- MODULE Versions ----
(* Model of a change of weights: publishers add versions to the registry, workers load them one after another, and
   clients follow the pointer.

   One action is one call of a script, or a step of a process between two calls. Version 0 is the checkpoint. Lanes.tla
   models the queue of one version; here a job is only queued or held.

   log       the registry: the publisher of each number, and the version "on" that a sparse version changes
   plan      the version that each publisher wants to add
   verdict   per version: "none", the worker that tries the version, "served", or "refused"
   tries     per version: trials that have begun
   pointer   the version that clients should use
   mode      state of a worker: "serves", "drains" (it ends its jobs before a change), "loaded" (it has the weights of
             its target and has not registered), "failed" (it must load its previous weights), or "gone" (killed)
   label     the version that a worker serves, or served before the change
   weights   the version whose weights a worker has in memory
   target    the version that a worker changes to
   listed    the version that a worker is registered for; a killed worker is registered until its record expires
   turn      workers that the lock for changes names
   left      workers that have left their version for a change; restarted workers are not among them
   late      workers that are slow: their turn and their trial have expired, but they go on
   jobs      jobs of clients in the queues of the versions, queued or held by a worker
   rows      answers that clients have not read: the queue of the request, the worker's label, and its weights
   asked     per client: the version in whose queue its request waits
   seen      per client: the newest version that the client has seen
   got       per client: its last answer, with the newest version that the client had seen then

   The model has no time: a record of a killed worker may expire at any moment. *)
EXTENDS Integers, FiniteSets, TLC
CONSTANTS
    Workers, Clients, Publishers,
    Steady,     \* workers that restart after they were killed; other workers may stay away
    MaxVersion, \* the largest number
    MaxGap,     \* max numbers that a publisher leaves out
    Sparse,     \* whether publishers also add sparse versions
    Fatal,      \* numbers whose weights kill each worker that loads them
    MaxAway,    \* max workers that change at the same time (--max-unavailable)
    MaxTries,   \* max trials of a version
    MaxAsks,    \* max requests of all clients together
    MaxKills, MaxLates, MaxLosses,  \* max killed workers, slow workers, and pointers that a failover sets back
    Break       \* name of the broken rule; "" if no rule is broken
VARIABLES log, plan, verdict, tries, pointer, mode, label, weights, target, listed, turn, left, late, jobs, rows, asked,
    seen, got, kills, lates, losses, asks
vars == <<log, plan, verdict, tries, pointer, mode, label, weights, target, listed, turn, left, late, jobs, rows, asked,
    seen, got, kills, lates, losses, asks>>
registry == <<log, plan>>
trials == <<verdict, tries>>
held == <<label, weights, target>>
turns == <<turn, left, late>>
queue == <<jobs, rows>>
clients == <<asked, seen, got>>
counts == <<kills, lates, losses, asks>>

Numbers == 1..MaxVersion
None == -1          \* no number
Full == -1          \* a full version changes no other version
Queued == "queued"
NoEntry == [by |-> "none", on |-> None]
NoPlan == [state |-> "idle", n |-> None, on |-> None]
NoAnswer == [v |-> None, label |-> None, weights |-> None, seen |-> None]
Symmetry == Permutations(Workers \ Steady) \cup Permutations(Clients) \cup Permutations(Publishers)

Init ==
    /\ log = [n \in Numbers |-> NoEntry] /\ plan = [p \in Publishers |-> NoPlan]
    /\ verdict = [n \in Numbers |-> "none"] /\ tries = [n \in Numbers |-> 0] /\ pointer = 0
    /\ mode = [w \in Workers |-> "serves"] /\ label = [w \in Workers |-> 0] /\ weights = [w \in Workers |-> 0]
    /\ target = [w \in Workers |-> 0] /\ listed = [w \in Workers |-> 0]
    /\ turn = {} /\ left = {} /\ late = {} /\ jobs = {} /\ rows = {}
    /\ asked = [c \in Clients |-> None] /\ seen = [c \in Clients |-> 0] /\ got = [c \in Clients |-> NoAnswer]
    /\ kills = 0 /\ lates = 0 /\ losses = 0 /\ asks = 0

\* Functions of a state.

Max(s) == CHOOSE n \in s : \A m \in s : m <= n
Published == {n \in Numbers : log[n] # NoEntry}
Last == Max({0} \cup Published)
NewestServed == Max({0} \cup {n \in Published : verdict[n] = "served"})
Newest == Max({0} \cup {n \in Published : verdict[n] # "refused"})
IsServed(v) == IF v = 0 THEN TRUE ELSE verdict[v] = "served"
Holds(w) == {j \in jobs : j.by = w}
\* The trial of a version has no worker, or this worker is killed or slow.
Untried(v) ==
    \/ verdict[v] = "none"
    \/ \E w \in Workers :
        /\ verdict[v] = w /\ Break # "no takeover"
        /\ ~(target[w] = v /\ mode[w] \in {"drains", "loaded"} /\ w \notin late)
\* The version that a worker may try. A version that is too old for a trial is tried if all later ones are refused.
Triable == IF Newest > 0 /\ Untried(Newest) /\ tries[Newest] < MaxTries THEN {Newest} ELSE {}
\* Jobs of a worker return to the queue, except jobs for which no client waits.
Requeued(w) ==
    {IF j.by = w THEN [j EXCEPT !.by = Queued] ELSE j : j \in {k \in jobs : k.by # w \/ asked[k.c] = k.v}}

\* Publishers

Read(p) ==
    /\ plan[p].state \in {"idle", "done"}
    /\ \E n \in Last + 1..Last + 1 + MaxGap, on \in {Full} \cup (IF Sparse THEN {Last} ELSE {}) :
        /\ n \in Numbers
        /\ plan' = [plan EXCEPT ![p] = [state |-> "ready", n |-> n, on |-> on]]
    /\ UNCHANGED <<log, trials, pointer, mode, held, listed, turns, queue, clients, counts>>

\* The registry takes larger numbers only, and a sparse version only after the version that it changes.
Add(p) ==
    LET n == IF Break = "sparse retry" /\ plan[p].n <= Last /\ Last < MaxVersion THEN Last + 1 ELSE plan[p].n
        is_larger == n > Last \/ Break = "no order"
        is_based == plan[p].on \in {Full, Last} \/ Break \in {"sparse retry", "numbers only", "no order"}
    IN  /\ plan[p].state = "ready"
        /\ IF is_larger /\ is_based THEN
             /\ log' = [log EXCEPT ![n] = [by |-> p, on |-> plan[p].on]]
             /\ plan' = [plan EXCEPT ![p] = [state |-> "done", n |-> n, on |-> None]]
           ELSE
             \* A full version gets another number; the differences of a sparse version must be computed again.
             /\ plan' = [plan EXCEPT ![p] = NoPlan]
             /\ UNCHANGED log
        /\ UNCHANGED <<trials, pointer, mode, held, listed, turns, queue, clients, counts>>

\* Workers

Claimed(w, v) ==
    IF IsServed(v) THEN UNCHANGED trials
    ELSE /\ verdict' = [verdict EXCEPT ![v] = w]
         /\ tries' = IF Break = "tries are not counted" THEN tries ELSE [tries EXCEPT ![v] = @ + 1]

\* A worker gets the turn and, for a version that is not tried yet, the trial. Workers of the oldest version go first.
Turn(w) ==
    /\ mode[w] = "serves"
    /\ Cardinality(turn) < MaxAway \/ Break = "no turn"
    /\ Break = "any worker first" \/ \A u \in Workers : listed[u] = None \/ listed[u] >= label[w]
    /\ \E v \in Triable \cup {NewestServed} :
        /\ v > label[w]
        /\ target' = [target EXCEPT ![w] = v]
        /\ Claimed(w, v)
    /\ mode' = [mode EXCEPT ![w] = "drains"]
    /\ turn' = turn \cup {w} /\ left' = left \cup {w}
    /\ UNCHANGED <<registry, pointer, label, weights, listed, late, queue, clients, counts>>

\* What remains of a killed worker: its record, its turn and its trial, until they expire. Its lease passes at once.
Dead(w) ==
    /\ mode' = [mode EXCEPT ![w] = "gone"]
    /\ label' = [label EXCEPT ![w] = None] /\ weights' = [weights EXCEPT ![w] = None]
    /\ target' = [target EXCEPT ![w] = None]
    /\ left' = left \ {w} /\ late' = late \ {w} /\ jobs' = Requeued(w)

\* A worker that holds no job removes its registration and loads the weights in place.
Load(w) ==
    /\ mode[w] = "drains" /\ (Holds(w) = {} \/ Break = "no drain")
    /\ listed' = [listed EXCEPT ![w] = None]
    /\ IF target[w] \in Fatal THEN Dead(w)
       ELSE /\ mode' = [mode EXCEPT ![w] = "loaded"]
            /\ weights' = [weights EXCEPT ![w] = target[w]]
            /\ UNCHANGED <<label, target, left, late, jobs>>
    /\ UNCHANGED <<registry, trials, pointer, turn, rows, clients, counts>>

\* The canary of the first worker, which may fail on one worker and pass on another one. The verdict is final. A worker
\* that is not named any more goes back, unless the version is served.
Decide(w) ==
    LET v == target[w] IN
    /\ mode[w] = "loaded" /\ v > 0
    /\ IF verdict[v] = w \/ (Break = "any verdict" /\ v > label[w]) THEN
         \E result \in {"served", "refused"} :
            /\ verdict' = [verdict EXCEPT ![v] = result]
            /\ mode' = IF result = "refused" THEN [mode EXCEPT ![w] = "failed"] ELSE mode
       ELSE
         /\ verdict[v] # "served"
         /\ mode' = [mode EXCEPT ![w] = "failed"] /\ UNCHANGED verdict
    /\ UNCHANGED <<registry, tries, pointer, held, listed, turns, queue, clients, counts>>

\* The pointer after a registration: it moves forward, to a version that has as many workers as the version it names.
Moved(v, records) ==
    LET count(u) == Cardinality({w \in Workers : records[w] = u})
    IN  IF v > pointer /\ count(v) >= count(pointer) THEN v ELSE pointer

Registered(w, v) ==
    /\ mode' = [mode EXCEPT ![w] = "serves"]
    /\ label' = [label EXCEPT ![w] = v] /\ target' = [target EXCEPT ![w] = v]
    /\ listed' = [listed EXCEPT ![w] = v] /\ pointer' = Moved(v, listed')
    /\ turn' = IF Break = "releases all" THEN {} ELSE turn \ {w}
    /\ left' = left \ {w} /\ late' = late \ {w}

Register(w) ==
    /\ mode[w] = "loaded"
    /\ IsServed(target[w])
    /\ Registered(w, target[w])
    /\ UNCHANGED <<registry, trials, weights, queue, clients, counts>>

\* Broken: a worker registers before its verdict.
RegisterEarly(w) ==
    /\ Break = "registers early" /\ mode[w] = "loaded" /\ listed[w] # target[w]
    /\ listed' = [listed EXCEPT ![w] = target[w]] /\ pointer' = Moved(target[w], listed')
    /\ UNCHANGED <<registry, trials, mode, held, turns, queue, clients, counts>>

Return(w) ==
    /\ mode[w] = "failed"
    /\ weights' = IF Break = "keeps the weights" THEN weights ELSE [weights EXCEPT ![w] = label[w]]
    /\ Registered(w, label[w])
    /\ UNCHANGED <<registry, trials, queue, clients, counts>>

\* A killed worker starts again, with the newest version that is served, or as the first worker of a newer version.
\* It needs no turn, because it serves no version.
Start(w) ==
    /\ mode[w] = "gone"
    /\ \E v \in Triable \cup {NewestServed} \cup (IF Break = "starts untried" THEN {Newest} ELSE {}) :
        /\ IF v = NewestServed \/ Break = "starts untried" THEN UNCHANGED trials ELSE Claimed(w, v)
        /\ IF v \in Fatal THEN UNCHANGED <<mode, held, turn, left, late, listed, pointer>>
           ELSE IF Break = "starts untried" THEN
             /\ weights' = [weights EXCEPT ![w] = v]
             /\ Registered(w, v)
           ELSE
             /\ mode' = [mode EXCEPT ![w] = "loaded"]
             /\ label' = [label EXCEPT ![w] = NewestServed]
             /\ weights' = [weights EXCEPT ![w] = v] /\ target' = [target EXCEPT ![w] = v]
             /\ UNCHANGED <<turn, left, late, listed, pointer>>
    /\ UNCHANGED <<registry, queue, clients, counts>>

\* A version whose trials all ended without a verdict is refused.
GiveUp(w) ==
    /\ mode[w] = "serves" /\ Newest > 0 /\ Untried(Newest) /\ tries[Newest] = MaxTries
    /\ verdict' = [verdict EXCEPT ![Newest] = "refused"]
    /\ UNCHANGED <<registry, tries, pointer, mode, held, listed, turns, queue, clients, counts>>

\* A heartbeat also moves the pointer.
Move(w) ==
    /\ mode[w] = "serves" /\ Break # "moves at registrations"
    /\ Moved(label[w], listed) # pointer
    /\ pointer' = Moved(label[w], listed)
    /\ UNCHANGED <<registry, trials, mode, held, listed, turns, queue, clients, counts>>

\* The record and the turn of a killed worker expire.
Expire(w) ==
    /\ \/ /\ mode[w] = "gone" /\ listed[w] # None
          /\ listed' = [listed EXCEPT ![w] = None] /\ UNCHANGED turn
       \/ /\ w \in turn /\ w \notin left /\ Break # "turns do not expire"
          /\ turn' = turn \ {w} /\ UNCHANGED listed
    /\ UNCHANGED <<registry, trials, pointer, mode, held, left, late, queue, clients, counts>>

Take(w) ==
    /\ mode[w] = "serves" /\ Holds(w) = {}
    /\ \E j \in jobs :
        /\ j.by = Queued /\ j.v = label[w]
        /\ jobs' = (jobs \ {j}) \cup {[j EXCEPT !.by = w]}
    /\ UNCHANGED <<registry, trials, pointer, mode, held, listed, turns, rows, clients, counts>>

\* An answer for which no client waits is dropped.
Finish(w) ==
    \E j \in Holds(w) :
        /\ jobs' = jobs \ {j}
        /\ rows' = IF asked[j.c] = j.v
                   THEN rows \cup {[c |-> j.c, v |-> j.v, label |-> label[w], weights |-> weights[w]]} ELSE rows
        /\ UNCHANGED <<registry, trials, pointer, mode, held, listed, turns, clients, counts>>

\* Clients

Request(c, v) ==
    /\ asked' = [asked EXCEPT ![c] = v]
    /\ jobs' = {j \in jobs : j.c # c \/ j.by # Queued}
        \cup (IF \E j \in jobs : j.c = c /\ j.v = v THEN {j \in jobs : j.c = c /\ j.v = v}
              ELSE {[c |-> c, v |-> v, by |-> Queued]})
    /\ rows' = {r \in rows : r.c # c}

Ask(c) ==
    /\ asked[c] = None /\ asks < MaxAsks
    \* Each request is for another prompt: a job of the previous request must not answer it.
    /\ \A j \in jobs : j.c # c
    /\ Request(c, IF Break = "follows back" THEN pointer ELSE seen[c])
    /\ got' = [got EXCEPT ![c] = NoAnswer] /\ asks' = asks + 1
    /\ UNCHANGED <<registry, trials, pointer, mode, held, listed, turns, seen, kills, lates, losses>>

Poll(c) ==
    /\ pointer > seen[c]
    /\ seen' = [seen EXCEPT ![c] = pointer]
    /\ UNCHANGED <<registry, trials, pointer, mode, held, listed, turns, queue, asked, got, counts>>

\* A client sends its request again, because the version in whose queue the request waits is left.
Resend(c) ==
    /\ asked[c] # None /\ asked[c] < seen[c] /\ Break \notin {"no resend", "follows back"}
    /\ Request(c, seen[c])
    /\ UNCHANGED <<registry, trials, pointer, mode, held, listed, turns, seen, got, counts>>

\* A client drops an answer of an older version than it has seen meanwhile.
Receive(c) ==
    \E r \in rows :
        /\ r.c = c /\ (r.v >= seen[c] \/ Break \in {"late answers", "follows back"})
        /\ got' = [got EXCEPT ![c] = [v |-> r.v, label |-> r.label, weights |-> r.weights, seen |-> seen[c]]]
        /\ asked' = [asked EXCEPT ![c] = None]
        /\ rows' = rows \ {r}
        /\ jobs' = {j \in jobs : j.c # c \/ j.by # Queued}
        /\ UNCHANGED <<registry, trials, pointer, mode, held, listed, turns, seen, counts>>

\* Faults

Kill(w) ==
    /\ kills < MaxKills /\ mode[w] # "gone"
    /\ Dead(w) /\ kills' = kills + 1
    /\ UNCHANGED <<registry, trials, pointer, listed, turn, rows, clients, lates, losses, asks>>

\* The turn and the trial of a worker expire, but the worker is only slow.
Late(w) ==
    /\ lates < MaxLates /\ mode[w] \in {"drains", "loaded", "failed"} /\ w \notin late
    /\ late' = late \cup {w} /\ turn' = turn \ {w} /\ lates' = lates + 1
    /\ UNCHANGED <<registry, trials, pointer, mode, held, listed, left, queue, clients, kills, losses, asks>>

\* A failover loses the last move of the pointer.
Lose ==
    /\ losses < MaxLosses /\ pointer > 0
    /\ \E v \in {0} \cup {n \in Published : verdict[n] = "served"} : v < pointer /\ pointer' = v
    /\ losses' = losses + 1
    /\ UNCHANGED <<registry, trials, mode, held, listed, turns, queue, clients, kills, lates, asks>>

Worker(w) ==
    \/ Turn(w) \/ Load(w) \/ Decide(w) \/ Register(w) \/ RegisterEarly(w) \/ Return(w) \/ GiveUp(w) \/ Move(w)
    \/ Expire(w) \/ Take(w) \/ Finish(w)
Next ==
    \/ \E p \in Publishers : Read(p) \/ Add(p)
    \/ \E w \in Workers : Worker(w) \/ Start(w) \/ Kill(w) \/ Late(w)
    \/ \E c \in Clients : Ask(c) \/ Poll(c) \/ Resend(c) \/ Receive(c)
    \/ Lose
Spec ==
    /\ Init /\ [][Next]_vars
    /\ \A w \in Workers :
        /\ WF_vars(Turn(w)) /\ WF_vars(Load(w)) /\ WF_vars(Decide(w)) /\ WF_vars(Register(w)) /\ WF_vars(Return(w))
        /\ WF_vars(GiveUp(w)) /\ WF_vars(Move(w)) /\ WF_vars(Expire(w)) /\ WF_vars(Take(w)) /\ WF_vars(Finish(w))
    /\ \A w \in Steady : WF_vars(Start(w))
    /\ \A c \in Clients : WF_vars(Poll(c)) /\ WF_vars(Resend(c)) /\ WF_vars(Receive(c))

\* Properties

\* Two publishers never have the same number.
Unique == \A p \in Publishers : plan[p].state = "done" => log[plan[p].n].by = p
\* A sparse version changes the version that precedes it in the registry.
Based == \A n \in Published : log[n].on = Full \/ log[n].on = Max({0} \cup {m \in Published : m < n})
\* The version of an answer is the version of the request's queue, and of the weights that computed the answer.
Labelled == \A c \in Clients : LET a == got[c] IN a.label = a.v /\ a.label = a.weights
\* A client gets no older version than it has seen.
Forward == \A c \in Clients : got[c] # NoAnswer => got[c].label >= got[c].seen
\* The pointer does not name a version that is refused or not tried.
Pointed == IsServed(pointer)
\* At most MaxAway workers change at the same time; a worker whose turn has expired is not counted.
Unavailable == Cardinality(left \ late) <= MaxAway
\* Without faults, a worker serves the version that clients use, or a later one.
Available ==
    kills = 0 /\ lates = 0 /\ Fatal = {} /\ Cardinality(Workers) > MaxAway
        => \E w \in Workers : mode[w] = "serves" /\ label[w] >= pointer
\* The pool converges to the newest version that is not refused.
Converges ==
    <>[](/\ pointer = Newest
         /\ \A w \in Workers : mode[w] = "gone" \/ (mode[w] = "serves" /\ label[w] = Newest /\ weights[w] = Newest))
\* Every request is answered.
Answered == \A c \in Clients : []<>(asked[c] = None)
====
