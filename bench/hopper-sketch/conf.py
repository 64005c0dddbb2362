import json,subprocess,sys
C={}
def add(n,d,bn,cons=2,st=2,qb=2,dv=None,extra=()):
    dv=dv or d
    C[n]=[d,dv,bn,cons,st,qb]
    r=subprocess.run(['bash','build.sh',n,f'-DDIM={d}',f'-DDV={dv}',f'-DBN={bn}',f'-DCONSUMERS={cons}',f'-DSTAGES={st}',f'-DQBUF={qb}',*extra],capture_output=True,text=True)
    print(n,[l.split(': ',1)[1] for l in r.stdout.split('\n') if 'spill' in l or 'error' in l or 'warn' in l.lower() or 'erializ' in l], (qb*64*cons*d*2+st*bn*(d+dv)*2+256))
exec(open(sys.argv[1]).read())
json.dump(C,open('conf.json','w'))
