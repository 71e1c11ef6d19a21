---- MODULE Adapters ----
(* Which adapters a model has, on a primary with a replica that lags behind: `lmpool.adapters` and what uses it.

   A state of the registry is a record.  "number" and "change" are its generation: the number grows with every change
   (by the clock, so a change may skip some), and "change" is drawn, so that no two changes are one generation.
   "base" is the generation over which it was made.  "holds" stands for the content: the changes that are in it.

   server, replica   what Redis has: the registry, and what each worker's heartbeat tells that it has seen of it; after
                     a failover that is old, and agrees with what is there
   worker            a process: what it has seen of the registry
   client            a producer: the last state that it has believed, and whether it may use it (it may for 2 s)
   look, made        whoever changes something: the state over which it may, and that which it has made
   returned          changes whose call has returned
   witnessed         what a client has ever read of

   Not modelled: names (any change may be of any), offers, refusals, and time.  That whoever changes something waits
   until what clients know has expired is a condition of Return here, and a timer and the marks `replaced` in the code.
   Heartbeats that a server has forgotten are there again before somebody changes something: who lives is listed. *)
EXTENDS Naturals, FiniteSets
CONSTANTS
    Workers, Clients,
    Steady,            \* workers that never end
    MaxDrawn,          \* how many generations there may be
    MaxNumber, MaxFailovers, MaxLosses,
    WorkersWriteBack,  \* a worker that reads a state which forgets what it has seen writes its own back
    ClientsRefuse,     \* a client that reads such a state does not believe it
    LooksAtBase,       \* what was made over an older state than was seen is such a state, not only what is older
    AsksWorkers,       \* a change is made over a state that all workers have seen
    Compares,          \* ... if that is still there then
    Waits              \* a change returns when the replica has it
VARIABLES server, replica, worker, client, look, made, returned, witnessed, drawn, failovers, losses
vars == <<server, replica, worker, client, look, made, returned, witnessed, drawn, failovers, losses>>

Never == [number |-> 0, change |-> 0]
Nothing == [gen |-> Never, base |-> Never, holds |-> {}]
First == [gen |-> [number |-> 0, change |-> 1], base |-> Never, holds |-> {}]
Before(g, h) == g.number < h.number \/ (g.number = h.number /\ g.change < h.change)
Later(g, h) == IF Before(g, h) THEN h ELSE g
\* Whether changes may be missing in a state that a process has seen: it was made by somebody who did not know of that.
Forgets(there, seen) == there.gen # seen.gen /\ Before(IF LooksAtBase THEN there.base ELSE there.gen, seen.gen)
\* What a process has seen, written down once more in the place of what is there.
Again(seen, there) == [seen EXCEPT
    !.gen = [number |-> Later(seen.gen, there.gen).number + 1, change |-> drawn + 1],
    !.base = Later(seen.gen, there.gen)]
Dead == [lives |-> FALSE, seen |-> Nothing]
Unlisted == [listed |-> FALSE, seen |-> Nothing, old |-> FALSE]

Init ==
    /\ server = [registry |-> First, beats |-> [i \in Workers |-> [listed |-> TRUE, seen |-> First, old |-> FALSE]]]
    /\ replica = First
    /\ worker = [i \in Workers |-> [lives |-> TRUE, seen |-> First]]
    /\ client = [c \in Clients |-> [believes |-> FALSE, known |-> Nothing]]
    /\ look = Nothing /\ made = Nothing /\ returned = {} /\ drawn = 1 /\ failovers = 0 /\ losses = 0
    /\ witnessed = [c \in Clients |-> {}]

\* A change: `AdapterChange`, `adopt.lua`.

Look ==
    /\ server.registry # Nothing /\ look.gen # server.registry.gen
    /\ AsksWorkers => \A i \in Workers : server.beats[i].listed => server.beats[i].seen.gen = server.registry.gen
    /\ look' = server.registry
    /\ UNCHANGED <<server, replica, worker, client, made, returned, witnessed, drawn, failovers, losses>>
Adopt == \E n \in (server.registry.gen.number + 1)..MaxNumber :
    /\ drawn < MaxDrawn /\ drawn' = drawn + 1
    /\ made = Nothing /\ look # Nothing /\ (Compares => look.gen = server.registry.gen)
    /\ made' = [gen |-> [number |-> n, change |-> drawn + 1], base |-> look.gen,
                 holds |-> server.registry.holds \cup {drawn + 1}]
    /\ server' = [server EXCEPT !.registry = made'] /\ look' = Nothing
    /\ UNCHANGED <<replica, worker, client, returned, witnessed, failovers, losses>>
Return ==
    /\ made # Nothing
    /\ made.gen.change \in server.registry.holds
    /\ \A i \in Workers : server.beats[i].listed =>
        ~server.beats[i].old /\ made.gen.change \in server.beats[i].seen.holds
    /\ client' = [c \in Clients |->
                    [client[c] EXCEPT !.believes = @ /\ made.gen.change \in client[c].known.holds]]
    /\ Waits => made.gen.change \in replica.holds
    /\ returned' = returned \cup {made.gen.change} /\ made' = Nothing
    /\ UNCHANGED <<server, replica, worker, look, witnessed, drawn, failovers, losses>>
GiveUp ==
    /\ made # Nothing \/ look # Nothing
    /\ made' = Nothing /\ look' = Nothing
    /\ UNCHANGED <<server, replica, worker, client, returned, witnessed, drawn, failovers, losses>>

\* Workers: `AdapterKeeper`, `restore.lua`.

Follow(i) ==
    /\ worker[i].lives
    /\ LET there == server.registry
           seen == worker[i].seen
       IN  IF Forgets(there, seen) /\ (WorkersWriteBack \/ there = Nothing)
           THEN /\ drawn < MaxDrawn /\ drawn' = drawn + 1
                /\ server' = [server EXCEPT !.registry = Again(seen, there)] /\ UNCHANGED worker
           ELSE /\ worker' = [worker EXCEPT ![i].seen = there]
                /\ server' = [server EXCEPT !.beats[i] = [listed |-> TRUE, seen |-> there, old |-> FALSE]]
                /\ UNCHANGED drawn
    /\ UNCHANGED <<replica, client, look, made, returned, witnessed, failovers, losses>>
End(i) ==
    /\ worker[i].lives /\ i \notin Steady
    /\ worker' = [worker EXCEPT ![i] = Dead] /\ server' = [server EXCEPT !.beats[i] = Unlisted]
    /\ UNCHANGED <<replica, client, look, made, returned, witnessed, drawn, failovers, losses>>
\* A worker that starts makes a registry where there is none, and may register what it brings where all have seen one.
Start(i) ==
    /\ ~worker[i].lives
    /\ LET there == server.registry
           beats == [server.beats EXCEPT ![i] = [Unlisted EXCEPT !.listed = TRUE]]
       IN  \/ there # Nothing /\ server' = [server EXCEPT !.beats = beats] /\ UNCHANGED drawn
           \/ /\ drawn < MaxDrawn /\ drawn' = drawn + 1
              /\ AsksWorkers => \A j \in Workers \ {i} : server.beats[j].listed => server.beats[j].seen.gen = there.gen
              /\ server' = [beats |-> beats, registry |->
                        IF there = Nothing THEN [First EXCEPT !.gen.change = drawn + 1]
                        ELSE [there EXCEPT !.gen = [number |-> @.number + 1, change |-> drawn + 1], !.base = there.gen]]
    /\ worker' = [worker EXCEPT ![i] = [lives |-> TRUE, seen |-> server'.registry]]
    /\ UNCHANGED <<replica, client, look, made, returned, witnessed, failovers, losses>>

\* Clients: `Adapters`.

\* A client that has seen changes believes what nobody has changed, or what was made beside them, when it has stood for
\* a lease: then no worker lives that would not have it so.
Stood(r) == \A i \in Workers : worker[i].lives => worker[i].seen.gen = r.gen
Believed(r, known) == Forgets(r, known) => Stood(r) /\ (r.holds = {} \/ Before(known.gen, r.gen))
Read(c) ==
    /\ server.registry # Nothing
    /\ ClientsRefuse => Believed(server.registry, client[c].known)
    /\ client' = [client EXCEPT ![c] = [believes |-> TRUE, known |-> server.registry]]
    /\ witnessed' = [witnessed EXCEPT ![c] = @ \cup server.registry.holds]
    /\ UNCHANGED <<server, replica, worker, look, made, returned, drawn, failovers, losses>>

\* Redis.

Replicate ==
    /\ replica # server.registry /\ replica' = server.registry
    /\ UNCHANGED <<server, worker, client, look, made, returned, witnessed, drawn, failovers, losses>>
Failover ==
    /\ failovers < MaxFailovers /\ failovers' = failovers + 1
    /\ server' = [registry |-> replica, beats |->
                    [i \in Workers |-> [listed |-> worker[i].lives, seen |-> replica, old |-> TRUE]]]
    /\ UNCHANGED <<replica, worker, client, look, made, returned, witnessed, drawn, losses>>
Lose ==
    /\ losses < MaxLosses /\ losses' = losses + 1
    /\ server' = [registry |-> Nothing, beats |-> [i \in Workers |-> [Unlisted EXCEPT !.listed = worker[i].lives]]]
    /\ replica' = Nothing
    /\ UNCHANGED <<worker, client, look, made, returned, witnessed, drawn, failovers>>

Next ==
    \/ Look \/ Adopt \/ Return \/ GiveUp
    \/ \E i \in Workers : Follow(i) \/ End(i) \/ Start(i)
    \/ \E c \in Clients : Read(c)
    \/ Replicate \/ Failover \/ Lose
Spec == Init /\ [][Next]_vars

\* No client uses a state without a change that has returned.
Fresh == \A c \in Clients : client[c].believes => returned \subseteq client[c].known.holds
\* As above, of those changes that this client has ever read of.
Remembered == \A c \in Clients : client[c].believes => (returned \cap witnessed[c]) \subseteq client[c].known.holds
\* When workers have nothing to follow or to write back, every change that has returned is in service.
Kept ==
    (\A i \in Workers : worker[i].lives => worker[i].seen.gen = server.registry.gen)
        => returned \subseteq server.registry.holds
====
