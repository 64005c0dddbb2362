add('d128',128,128)
add('d64p',64,128,cons=3)
add('d64q',64,128,cons=2)
add('d256',256,80,qb=1)
